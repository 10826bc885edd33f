"""What lets a target draft for itself: its weights, its card, and how they are computed."""
