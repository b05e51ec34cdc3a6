"""See what the numbers do."""
