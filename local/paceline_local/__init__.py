"""A system of real processes on this machine: commands start and watch it."""
