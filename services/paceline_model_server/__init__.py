"""What drafter and target services share: one model behind gRPC."""
