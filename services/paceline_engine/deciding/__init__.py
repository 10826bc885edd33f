"""What follows from logits: tokens, verdicts, and what a stage of a stack accepts."""
