"""Checks what 16 bits do to a model: `diagnose` for its numbers, `dtype_report` for its dtypes.

`diagnose` traces the loss and its gradient as one program. It runs this program on
*pairs*: each value as the program computes it, beside its *reference*, which is the
same value in float32. For each result, it makes a *note* of how far the two are apart
and how large they are. The note also links to the notes of the operands. If `x` is off
by 1% and `exp(x)` by 8%, the link shows that the exponential enlarged the error.

From the notes follow the loss scale that fits and, if a result is off, the equation
that is to blame, which is called *at fault*. If a result is off, or float32 would
choose another index or branch, the program also runs in float32 beside float64. Float32
*determines* a result if these two agree on it, or are far less apart than 16 bits and
float32 are. This run also shows the results of the choices that float32 makes.

A result whose numbers are only moved, such as a transpose, shares the note of its
operand. A slice gets a note of its own, as it may lack the largest numbers. So do the
rows that a loop slices and the stacks that it joins, but the table of a report leaves
these out.

These words are used in all files:

- A dtype is *narrow* if it is a floating-point dtype of 16 bits or fewer.
- The *reference* of a value is the same value in wider floats: in float32 beside the
  program as it is, and in float64 beside the program in float32.
- A result is *off* if it differs from its reference; how far is relative to the size of
  the reference. A number is *bad* if it is not finite although its reference is, and
  *lost* if it is 0 although its reference is not.
- A value *belongs to the backward pass* if it depends on the seed of that pass, which
  is the loss scale. If the pass is linear, its floats are proportional to the scale.
- A *choice* is an integer or boolean that depends on floats, such as an index, a mask
  or the condition of a loop. The reference *follows* the choices of the value that it
  is compared with.
- An *origin* is what all iterations of an equation share: its source line, its scope.
- An *instruction* is an equation to run. A *piece* is a sequence of consecutive
  instructions that are compiled together.

Read the files in this order, from the parts to the whole. They build on `_programs`,
which explains equations:

- `text`, `figures`, `notes`: words for reports; the error and size of a result; its
  note.
- `equations`, `dtypes`: the equations of a program; `dtype_report`, which only reads
  them.
- `wide`, `program`, `pairs`: one equation in wider floats; a program cut into pieces; a
  piece computed on pairs.
- `value`, `loops`, `devices`, `shadow`: a whole program run on pairs, with notes.
- `gradient`, `paths`, `scale`, `run`: the gradient, run at scale 1 and at the scale
  that fits.
- `fault`, `cause`, `wrong`: the equation at fault, what it does, and what is wrong.
- `table`, `choices`: a row for each equation, and what float32 decides differently.
- `page`, `advice`, `axes`, `picture`, `diagnose`: the report and its picture.
"""
