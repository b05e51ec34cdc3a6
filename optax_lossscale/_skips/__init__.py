"""Skip rules: which steps to skip although their gradients and loss are finite."""
