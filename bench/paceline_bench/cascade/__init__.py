"""`paceline bench cascade`."""
