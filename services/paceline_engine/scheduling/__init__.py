"""The thread that owns a model: which items share its next forward, and what forwards take."""
