"""Runs any function with its matrix products in 16 bits, and most else in float32.

`autocast` traces the function in float32, plans how to run the traced program, and runs
it by that plan. The plan is a list of *regions*. For `jnp.sum(jnp.exp(x @ w))` there
are two:

- The product reads `x` and `w` in 16 bits, and stores its result in 16 bits.
- An *island* reads this result, computes `exp` and the sum in float32, and stores the
  sum in float32.

An island is made of the cheap operations between two products, or after the last one.
It computes in float32 as one unit, and rounds the values that the next product reads to
16 bits. The backward pass recomputes the island from the values that it reads: here it
recomputes `exp` from the result of the product.

Outside products, two kinds of operations stay in 16 bits: those that only move the
numbers of a product's result, or sum them over devices, and the sums of a *stream* (see
below).

Three passes make the plan. Each is a pure function in its own file:

1. `classify` walks the program forward. It decides which values 16 bits can hold, from
   how each value is computed. It uses `normalized` to recognize a value minus its mean,
   or divided by its norm.
2. `uses` walks the program backward. It finds the values that a later product depends
   on, and those that are *live across* a product, which means that they are read after
   it. `facts` combines both passes into the dtype in which each value is stored, if it
   is stored at all.
3. `store` walks backward over the parts into which `partition` divides the program:
   islands, and equations between them. It decides what each island stores, and which
   cheap equations an island repeats. `region` then builds each region. It decides what
   a region reads and what each of its steps casts, and asks `recomputed` whether the
   backward pass recomputes the region.

`plan` applies `facts` and `store` to the program, and to each program inside it, such
as the body of a loop or a branch. Every pass reads a program through `flat`, which
inlines short calls. The body of a loop is classified again and again, until the kinds
of its carry no longer change. `run` executes the plan. It uses `enter` to run an
equation such as a `scan` with other programs inside, and `derivatives` to run a
function with a custom derivative.

The other files are small parts. `arrays` turns a call into a program, with the help of
`nnx` for Flax NNX objects. `products` decides which products are narrowed. `alike`
finds islands that can share one trace, `outer` computes outer products, and `shown`
prints plans. `autocast` and `cast_inputs` hold the public functions.

Terms:

- An *equation* is one operation of the traced program, with its operands and results. A
  *step* is an equation in a region, with the dtypes to which it casts its operands.
- A *product* is a matrix product or a convolution that sums. It is *narrowed* if it
  runs in 16 bits; the 16-bit dtype is called *low*. To *round* a value is to cast it to
  this dtype.
- An equation that holds programs is *rewritten* if it runs them by plans of their own.
  It is if nothing forbids it, and if they contain a product to narrow or an outer
  product to replace. A `custom_vjp` is whenever nothing forbids it: its rule, which is
  not traced yet, may contain either.
- A *region* is a list of steps that run as one: an island, a part of an island, or a
  single step such as a product. An island depends on products, and computes in float32
  except for moves, and for sums that are stored in 16 bits.
- A value is *stored* if a later region reads it, or if the program returns it. Instead
  of reading a value, a region may *repeat* the cheap step that computed it.
- The values that an island reads are *kept* for the backward pass; JAX calls them
  residuals. All other values in the island are *recomputed*, except for a few
  reductions, which are kept too.
- A *stream* is a sum to which layer after layer adds, such as the residual stream of a
  transformer. It is stored in 16 bits from product to product.
"""
