"""Which files are a model, checked and read once; nothing here needs torch."""
