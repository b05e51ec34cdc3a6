"""The page that `diagnose` prints of the demo's model, its loss divided by 1024.

Prints the first page of docs/diagnosis.md, and the verdict on the undivided loss, in 20 seconds.
"""

import jax

import optax_lossscale as ols
from optax_lossscale.demo import _model, _text


@ols.autocast
def loss_fn(params, tokens):
    """The mean over 1024 micro-batches."""
    return _model.loss(params, tokens) / 1024


if __name__ == "__main__":
    tokens = _text.batches(_text.read(), 1, seed=0)[0]
    params = _model.init(jax.random.key(0))
    print(ols.diagnose(loss_fn, params, tokens))
    print(
        "\nUndivided:", ols.diagnose(ols.autocast(_model.loss), params, tokens).verdict
    )
