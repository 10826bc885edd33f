"""Several models that draft as one."""
