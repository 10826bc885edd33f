"""Trains what lets a target draft for itself. A server needs none of it."""
