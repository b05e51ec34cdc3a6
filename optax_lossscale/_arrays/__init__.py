"""Questions about arrays and trees of them."""
