"""Models of the transformers library: loaded by transformers.py, computed by computed_model.py."""
