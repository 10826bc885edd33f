"""Generated from protos/paceline/v1."""
