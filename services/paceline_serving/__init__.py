"""The parts that all of Paceline's processes share. No torch."""
