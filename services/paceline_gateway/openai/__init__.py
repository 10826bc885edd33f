"""OpenAI's routes, with what other servers added to them."""
