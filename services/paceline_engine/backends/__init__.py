"""The model backends, one file each."""
