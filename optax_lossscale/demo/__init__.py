"""A transformer trained in float16 with and without loss scaling, and in float32.

Run it by `python -m optax_lossscale.demo`. `__main__.py` trains and plots; the two
other files hold the model and the text.
"""
