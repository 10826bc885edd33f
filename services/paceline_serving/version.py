"""Which version of Paceline this is."""

from __future__ import annotations

from importlib import metadata

VERSION = metadata.version("paceline")
"""As installed. It is read once: each look opens files."""
