"""Anthropic's routes, and its form of errors."""
