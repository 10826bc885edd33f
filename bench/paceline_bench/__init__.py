"""The papers' tables and figures, and comparisons with peers, as functions; commands call them."""
