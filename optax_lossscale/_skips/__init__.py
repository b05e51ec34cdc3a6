"""Choose what else to skip a step for."""
