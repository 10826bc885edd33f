"""The papers' tables and figures, comparisons with peers, and the commands that measure them."""
