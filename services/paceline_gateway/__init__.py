"""The gateway: OpenAI's and Anthropic's HTTP interfaces, as a client of orchestrators."""
