"""The model servers: where they are, how they are, and what they said."""
