"""Bodies of requests: their JSON, and the schemas of every interface."""
