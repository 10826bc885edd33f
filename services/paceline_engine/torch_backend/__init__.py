"""Models of the transformers library, computed with torch; transformers.py is the backend."""
