"""Traces functions into programs, reads these, and runs them with parts replaced.

`autocast`, `dtype_report` and `diagnose` are built on this package. A *program* is a
jaxpr, open or closed: a list of equations, each of which applies one of JAX's
operations, such as `dot_general`, to operands. An equation may itself hold programs,
as a `scan` holds its body.

For example, these are the equations of a function that calls a jitted one:

    >>> import jax, jax.numpy as jnp
    >>> from optax_lossscale._programs.flat import flat
    >>> from optax_lossscale._programs.versions import name_of
    >>> from optax_lossscale._programs.products import is_product
    >>> x = jnp.ones((4, 4))
    >>> program = jax.make_jaxpr(lambda x: jax.jit(jnp.exp)(x @ x))(x)
    >>> for eqn in flat(program).eqns:
    ...     print(name_of(eqn), is_product(eqn))
    dot_general True
    exp False

Read the files in this order:

- `operations.py`: sets of operations, one for each question that is asked of them.
- `versions.py`: what is known to differ in programs between versions of JAX.
- `values.py`: the dtypes and sizes of values.
- `walk.py`: the programs in an equation, and the values that a value depends on.
- `cached.py`: results for a program, computed once.
- `products.py`: which equations are products, and how much they multiply.
- `lines.py`: the line of the user's code that made an equation.
- `flat.py`: a program with its short calls inlined.
- `enter.py`: an equation such as a `scan`, run with its inner programs replaced.
- `call.py`: a call of any function, traced into a program from arrays to arrays.
- `nnx.py`: Flax NNX objects, which a function may change, carried through that trace.
"""
