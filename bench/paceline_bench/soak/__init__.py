"""`paceline bench soak`."""
