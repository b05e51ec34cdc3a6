"""Choose a loss scale."""
