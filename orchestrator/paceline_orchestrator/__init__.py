"""The stateless orchestrator: runs decoding methods over drafters and targets."""
