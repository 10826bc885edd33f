"""What README.md and docs/ say of measurements, a module for each benchmark."""
