"""Read the programs that JAX traced, and run them in another way.

A *program* is a jaxpr, open or closed. It consists of equations, each of which applies
an operation of JAX, such as `dot_general`, to operands. An equation may hold programs
of its own, as that of a `scan` holds its body. Read the files in this order:

- `operations.py`: the table of what is known of each operation.
- `versions.py`: the attributes of programs that differ between versions of JAX.
- `values.py`: the dtypes and sizes of values.
- `walk.py`: the programs in an equation, and what values are computed from.
- `cached.py`: results for a program, computed once.
- `work.py`: which equations are products, which are cheap, and how much they compute.
- `lines.py`: the line of the user's code that made an equation.
- `flat.py`: a program without its short calls, or without any.
- `enter.py`: an equation such as `scan`, run with its inner programs replaced.
- `keys.py`: keys of equations that compute the same.
"""
