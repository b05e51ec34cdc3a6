"""Any function in 16 bits: products are narrow, all else is in float32 but stored narrow.

The words that the files of this folder share:

- An *equation* is what JAX traced; a *step* is an equation whose operands and results
  have numbers of the whole program (`flat.py`).
- A product is *narrowed* if it is computed in 16 bits. A program is *rewritten* if its
  products are narrowed, by a plan of its own.
- A *region* is what runs as one: a step by itself, or an *island*, which lies between
  products and computes in float32 (`partition.py`).
- A value is *stored*, in a dtype, if regions after its own read it. If it is cheap, they
  may *repeat* its step instead (`store.py`).
- For the backward pass, what an island reads is *kept*, and what it computes is
  *recomputed*, but for some reductions, which are kept as well.
- A value is *sent* if it goes from device to device, or under a name, in 16 bits.

The passes, each a pure function in a file of its own: `classify`, `uses`, `partition`,
`store`, `plan`. `run` follows the plan.
"""
