"""What lets a target draft for itself: small weights beside a model that stays as it is."""
