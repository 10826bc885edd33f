"""What README.md and docs/performance.md say of measurements, a module for each benchmark."""
