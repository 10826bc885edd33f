"""`paceline bench self`."""
