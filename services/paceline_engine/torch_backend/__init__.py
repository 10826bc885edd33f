"""Models of the transformers library: loaded by transformers.py, computed by loaded_model.py."""
