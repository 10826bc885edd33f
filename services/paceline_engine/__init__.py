"""Models and KV caches, sampling, verification. No gRPC."""
