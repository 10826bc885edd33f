"""`paceline simulate`."""
