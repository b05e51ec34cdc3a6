"""What is asked of arrays and their trees."""
