"""What tries methods out without models: a simulator on a virtual clock, and formulas.

Planners, benchmarks and tests use it. No method does.
"""
