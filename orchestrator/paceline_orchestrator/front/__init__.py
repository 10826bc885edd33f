"""What clients see: requests in, messages out."""
