"""A system of real processes on this machine, and what commands need to start and watch it."""
