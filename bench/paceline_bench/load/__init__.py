"""`paceline bench load`."""
