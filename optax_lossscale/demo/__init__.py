"""A transformer trained in float16 with and without loss scaling, and in float32.

Run it with `python -m optax_lossscale.demo`. `__main__.py` trains and plots,
`_model.py` defines the transformer, and `_text.py` reads the training text.
"""
