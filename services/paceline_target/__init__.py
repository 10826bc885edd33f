"""The target service."""
