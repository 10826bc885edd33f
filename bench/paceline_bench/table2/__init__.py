"""`paceline bench table2`."""
