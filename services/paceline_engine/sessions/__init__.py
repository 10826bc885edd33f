"""What a model server holds for its callers, and how their calls reach the worker."""
