"""The installed version of Paceline."""

from __future__ import annotations

from importlib import metadata

VERSION = metadata.version("paceline")
"""Read once, since reading it opens files."""
