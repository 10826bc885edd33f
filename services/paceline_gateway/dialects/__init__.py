"""Dialects: how models write calls of tools and their reasoning, as grammars and as parsers."""
