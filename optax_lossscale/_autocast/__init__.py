"""Runs any function with its matrix products in 16 bits and most else in float32.

`autocast` is a small compiler. It traces the function in float32, plans how to run the
traced program, and runs it by that plan. Five words are needed to read a plan:

- A *product* is a matrix product or a convolution that sums. Most products are
  *narrowed*: they read and return 16 bits.
- A *region* is a list of equations that run as one unit. It *stores* those of its
  results that later regions read, or that the program returns.
- An *island* consists of cheap equations between two products, or after the last one,
  which a compiler can fuse. It becomes one region or several, which compute in float32
  and round what the next product reads to 16 bits.

For the backward pass, the values that an island reads are saved as residuals, and so
are a few reductions in it. In most islands, all other values are recomputed. For
example:

    >>> import jax.numpy as jnp
    >>> import optax_lossscale as ols
    >>> def f(x, w):
    ...     return jnp.sum(jnp.exp(x @ w))
    >>> x, w = jnp.ones((8, 4)), jnp.ones((4, 4))
    >>> print(ols.autocast(f).plan(x, w))  # doctest: +ELLIPSIS
    takes x:f32, w:f32
    run: dot_general (x:f16, w:f16) -> 2:f16  # ... (f)
    island: exp reduce_sum (2:f16) -> 4:f32  # ... (f)
    gives 4:f32

Each line between the first and the last is a region. The first region is a narrowed
product: it casts `x` and `w` to float16 and stores its result, the value 2. The second
is an island, which casts that value to float32 and stores the sum of the exponentials.
The value 2 is saved, and the backward pass recomputes `exp` from it.

Outside products, two kinds of operations run in 16 bits. Some only move the elements of
a product's result or sum them over devices. The others are the sums of a residual
stream, to which one layer after another adds.

Three passes make the plan. Each is a pure function in its own file:

1. `classify` analyzes the program forward. It derives the *kind* of each value, which
   decides whether 16 bits can hold it, from the value's producer and the kinds of the
   operands. `normalized` recognizes a value minus its mean or divided by its norm.
2. `uses` analyzes the program backward. It finds the values that a later product
   depends on, and those that are *live across* a product, that is, read after it.
   `facts` combines both passes into the dtype in which each value is stored, if it is.
3. `partition` divides the program into islands and the equations between them. `store`
   walks backward over these parts and decides what each island stores, and which cheap
   equations an island *repeats* instead of reading their results. `region` then decides
   what a region reads and casts, and `recomputed` whether the backward pass recomputes
   it.

`plan` applies these passes to the program, and to the programs in each equation that is
*rewritten*, that is, runs its programs by plans of their own. An equation such as a
`scan` or a `cond` is rewritten if `products` finds nothing that forbids it and if its
programs contain a product to narrow or an outer product to replace. A `custom_vjp` is
rewritten whenever nothing forbids it, because its rule, which is not traced yet, may
contain such a product. The body of a loop is classified again and again until the kinds
of its carry no longer change. Every pass reads a program through `flat`, which inlines
short calls.

`run` executes the plan. It uses `enter` to run an equation with other programs inside
and `derivatives` to run a function with a custom derivative.

The other files are small parts. `products` decides which products are narrowed. `alike`
finds islands that can share one trace, `outer` computes outer products, and `shown`
prints plans. `autocast` and `cast_inputs` hold the public functions.

To find out why a value has the dtype that the plan shows, begin with
`facts.stored_dtype`, which states the rule.
"""
