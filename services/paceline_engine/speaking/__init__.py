"""A model that drafts for a target with another vocabulary."""
