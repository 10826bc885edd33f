"""How many targets the service wants, and telling who provides them."""
