"""Take a step."""
