"""The page at `/`, and the data that it shows."""
