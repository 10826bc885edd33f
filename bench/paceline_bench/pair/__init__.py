"""`paceline bench pair`."""
