"""Generated from protos/externalscaler."""
