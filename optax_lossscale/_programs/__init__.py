"""Reads the programs that JAX traced, and runs them with parts replaced.

A *program* is a jaxpr, open or closed: a list of equations, each of which applies one
of JAX's operations, such as `dot_general`, to operands. An equation may itself hold
programs. For example, a `scan` holds its body. Read the files in this order:

- `operations.py`: the table of what is known of each operation.
- `versions.py`: the attributes known to differ between versions of JAX.
- `values.py`: the dtypes and sizes of values.
- `walk.py`: the programs in an equation, and the values that a value depends on.
- `cached.py`: results for a program, computed once.
- `work.py`: which equations are products, which are cheap, and how much they compute.
- `lines.py`: the line of the user's code that made an equation.
- `flat.py`: a program with its short calls, or all of its calls, inlined.
- `enter.py`: an equation such as `scan`, run with its inner programs replaced.
- `keys.py`: keys that are equal for equations that compute the same.
"""
