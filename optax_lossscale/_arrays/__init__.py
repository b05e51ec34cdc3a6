"""Helpers for arrays, dtypes and pytrees, on which all other parts are built."""
