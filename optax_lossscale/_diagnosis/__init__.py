"""Checks what 16 bits do to a model: `diagnose` and `dtype_report`.

`diagnose` compares the values in a model with the same values in float32, and
`dtype_report` lists the dtypes in which the model computes.

`diagnose` traces the loss and its gradient as one program. It runs this program on
*pairs*: each value as the program computes it, beside its *reference*, the same value
in float32. For each result, it makes a *note*, which records the error and magnitude of
the result and holds the notes of the operands. For `1 / (a - b)` in float16, where `a`
is 0.1 and `b` is 0.0999, the notes say

    a            off by  0.0%
    b            off by  0.0%
    a - b        off by 39.0%    from a and b
    1 / (a - b)  off by 63.8%    from a - b

Followed back from the wrong quotient to its operands, the notes lead to the difference.
This is where the error arises, so the difference is *at fault*. The magnitudes in the
notes of the backward pass show which loss scale fits.

Float32 has rounding errors and makes choices of its own, too. If a result may be wrong,
or if float32 would choose another index or branch, the program therefore runs a second
time: in float32, and its reference is then float64. This run shows two things. It makes
the choices of float32, so it shows which results depend on them. It also shows which
results float32 *determines*: those for which float32 is close to float64, or at least
much closer than 16 bits are to float32. No other result is judged, because 16 bits may
not be to blame for its error.

An equation that only moves the elements of its operand, such as a transpose, makes no
note: its result shares the note of the operand. A slice is an exception, because it may
lack the largest elements of its operand. The rows into which a loop slices an array and
the arrays that a loop stacks have notes of their own as well, but these notes are not
in the table of a report.

These words are used in many files:

- A dtype is *narrow* if it is a floating-point dtype of 16 bits or fewer.
- The *reference* of a value is the same value in wider floats: in float32 beside the
  program as it is, and in float64 beside the program in float32.
- A result is *off* by 5% if its difference from its reference is 5% of the reference.
  Without a number, *off* means by more than 5%.
- An element is *lost* if it is 0 although its reference is not. In the counts of
  `Underflow`, an element that is subnormal in float16 is lost as well.
- The *seed* of the backward pass is the cotangent of the loss, which is the loss scale.
- A *choice* is an integer or boolean that depends on floats, such as an index, a mask
  or the condition of a loop. The reference *follows* the choices of the value with
  which it is compared: it reads the same rows and takes the same branch.
- The *origin* of a value is the equation that computed it, with its source line and
  scope, or else an argument. All iterations of a loop have the same origins, but notes
  of their own.
- A *piece* is a sequence of consecutive equations that are compiled together, or a
  single equation that Python runs, such as a loop.

Read the files in this order, from the parts to the whole. They build on `_programs`,
which explains equations:

- `text`, `figures`, `notes`: the layout of reports; the error and magnitude of a
  result; its note.
- `equations`, `dtypes`: the equations of a program; `dtype_report`, which reads them
  and runs nothing.
- `wide`, `program`, `pairs`: one equation in wider floats; a program cut into pieces; a
  piece computed on pairs.
- `value`, `loops`, `devices`, `shadow`: a whole program run on pairs, with notes.
- `gradient`, `paths`, `scale`, `run`: the gradient, run at a loss scale of 1 and at
  others until one fits.
- `fault`, `cause`, `wrong`: the equation at fault, what it does, and what is wrong.
- `table`, `choices`: a row for each result, and what float32 decides differently.
- `page`, `advice`, `axes`, `picture`, `diagnose`: the report and its picture.
"""
