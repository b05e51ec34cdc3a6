"""The main use: a transformer trained in float16, with and without loss scaling."""
