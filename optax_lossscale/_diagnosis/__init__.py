"""Checks what 16 bits do to a model: `diagnose` and `dtype_report`.

`diagnose` traces the loss and its gradient as one program, and computes each of its
equations twice: as the program does, and in float32. For each it fills in a row of a
table. For `1 / (a - b)` in float16, where `a` is 0.1 and `b` is 0.0999, the rows say

    sub   operands off by  0.0%, result by 39.0%
    div   operands off by 39.0%, result by 63.8%

so the difference is where the quotient goes wrong. The backward pass is linear in the
loss scale, so the magnitudes in its rows at a scale of 1 say which scale fits. At that
scale it runs once more.

These words are used in many files:

- The *low* value is what the program computes, and the *true* one what float32 does.
- A value is *off* if the two differ by more than 5%, or if the low one is not finite
  though the true one is. An element is *lost* if it is 0 though the true one is not.
- The *seed* of the backward pass is the cotangent of the loss, which is the loss scale.

Read the files in this order:

- `gradient`: the loss and its gradient as a program, in two parts.
- `figures`, `table`: two values compared; the rows, and which are suspects.
- `equation`, `loops`, `program`: one equation on pairs; loops and branches; a program,
  which fills in the table.
- `report`, `axes`, `text`: the page, the plot, and their layout.
- `diagnose`: all of it.
- `dtypes`: `dtype_report`, which reads a program and runs nothing.
"""
