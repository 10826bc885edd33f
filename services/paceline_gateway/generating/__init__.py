"""Generations: how tokens are chosen, what is made of a turn, and what is told of it."""
