"""What all parts of the engine mean: calls, items, proposals, caches, and what a backend is."""
