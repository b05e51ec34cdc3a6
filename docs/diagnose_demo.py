"""The page that `diagnose` prints of the demo's model, its loss divided by 1024.

docs/diagnosis.md shows it.
"""

import jax

import optax_lossscale as ols
from optax_lossscale import demo


@ols.autocast
def loss_fn(params, tokens):
    """The mean over 1024 micro-batches."""
    return demo.mean_loss(params, tokens)


if __name__ == "__main__":
    tokens = demo.batches(1)[0]
    params = demo.init(jax.random.key(0))
    print(ols.diagnose(loss_fn, params, tokens))
