"""`paceline bench gateway`."""
