"""The orchestrators that a gateway has, and whether they serve."""
