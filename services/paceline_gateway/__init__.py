"""The gateway: OpenAI's HTTP interface, as a client of orchestrators."""
