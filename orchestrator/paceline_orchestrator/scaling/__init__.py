"""How many targets the service wants, and how scalers hear of it."""
