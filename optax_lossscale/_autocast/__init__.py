"""Runs any function with its matrix products in 16 bits, and most else in float32.

`autocast` traces the function in float32, makes a plan for the traced program, and runs
the plan. For `jnp.sum(jnp.exp(x @ w))` the plan has two regions: the product, which
takes and gives 16 bits, and an island, which reads that result, computes `exp` and the
sum in float32, and stores the sum in float32. Whatever a later product reads is rounded
to 16 bits first. The backward pass recomputes `exp` from the result of the product.

What stays in 16 bits past a product is what only moves its numbers, and the *stream*.

The plan is made by pure functions, each in a file of its own:

1. `classify` goes forward, and says which values 16 bits can hold, by how the values
   are computed. It calls `normalized`, which finds values minus their mean, or over
   their norm.
2. `uses` goes backward, and says which values products depend on, and which are read
   again past a product. `facts` calls both passes; from their results follows the dtype
   in which each value is stored, if it is.
3. `store` calls `partition`, which divides the equations into islands and others, and
   goes backward. It says what each island stores, and which cheap equations islands
   repeat. It makes the regions by `region`, which says what each step casts and what
   each region reads, and by `recomputed`, which says which regions the backward pass
   recomputes.

`plan` calls `facts` and `store` for the program, and for each program in a loop, a
branch and so on. Each pass replaces the short calls of a program by their equations
first, with `flat`. The body of a loop is classified until the kinds of its carry no
longer change. `run` runs the plan: `enter` replaces the programs in an equation, and
`derivatives` those with a custom rule.

Around the plan, `arrays` makes a program of a call, with `nnx` for the objects of Flax
NNX. `products` says which products are narrowed. `alike` finds islands that one trace
serves, `outer` computes outer products, and `shown` prints plans. `autocast` and
`cast_inputs` are public.

The words that these files share:

- An *equation* is what JAX traced. A *step* is an equation in a region, with the dtypes
  to which it casts its operands.
- A *product*, which is a matrix product or convolution that sums, is *narrowed* if it
  is computed in 16 bits, the *low* dtype. An equation that holds programs is
  *rewritten*, by a plan for each program, if they hold a product to narrow or an outer
  product to replace, or if it is a `custom_vjp`, whose rule may compute either.
- A *region* is a list of steps that run as one: an *island* or a part of one, which
  depends on products and computes in float32 but for moves and for sums stored in 16
  bits, or a single step, such as a product.
- A value is *stored* if a later region reads it, or if it is a result of the program. A
  region may also *repeat* a cheap step of an earlier one, and not read its result.
- For the backward pass, the values that an island reads are *kept*, which JAX calls its
  residuals; its other values are *recomputed*, except some reductions, kept as well.
- A *stream* is a sum that layer after layer adds to, such as the residual stream of a
  transformer. It is stored in 16 bits from product to product.
"""
