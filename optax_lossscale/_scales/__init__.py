"""Loss scales: the rules by which the factor of the loss adapts to the gradients."""
