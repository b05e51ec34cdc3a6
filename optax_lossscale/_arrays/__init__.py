"""What all other parts are built on: arrays and pytrees, checks, names and settings."""
