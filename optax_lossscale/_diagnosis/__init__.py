"""See what the numbers do, by `diagnose`, and in which dtype, by `dtype_report`.

`diagnose` traces the loss and its gradient as one program, and runs this program with
every value in a *pair*: as the program computes it, and as it is in float32. For each
result that is computed it makes a *note*. The note says how far the two are apart, how
large they are, and which notes the operands have. Moved numbers keep the note of what
they were moved from. Only loops make notes of slices and stacks, which are in no table.
From the notes follow the loss scale that fits, and, for a result that is off, the
equation that is at fault. Where something is off, the program also runs in float32
beside float64, which tells what float32 determines, and how it decides by itself.

Read the files in this order, which is from the parts to the whole. `_programs` tells
what equations are, and comes before them:

- `text`, `figures`, `notes`: what is known of a result, and of what it is made.
- `equations`, `dtypes`: all equations of a program, and `dtype_report`, which runs none.
- `wide`, `program`, `pairs`: a program in pieces, and a piece computed in pairs.
- `value`, `loops`, `devices`, `shadow`: a program run in pairs, and noted.
- `gradient`, `paths`, `scale`, `run`: the gradient, run at 1 and at the scale that fits.
- `fault`, `cause`, `wrong`: the equation at fault, what it does, and what is wrong.
- `table`, `choices`: a row for each equation, and what float32 decides otherwise.
- `page`, `advice`, `axes`, `picture`, `diagnose`: what is found, said and drawn.

The words that these files share:

- A dtype is *narrow* if it is a floating-point one of 16 bits or fewer.
- The *reference* of a value is the same value in wider floats: in float32 beside the
  program as it is, and in float64 beside the program in float32.
- A number is *off* by its distance from its reference, relative to the reference. It is
  *bad* if it is not finite where the reference is, and *lost* if it is 0 where the
  reference is not.
- A value is *of the backward pass* if it depends on that pass's seed, which is the loss
  scale. So if it is a float, it grows as the loss scale does, unless the pass is not
  linear.
- A *choice* is an integer or boolean that depends on floats, such as an index, a mask
  or the condition of a loop. The reference *follows* the choices of the other value.
- An *origin* is what all iterations of an equation share: its line, and its scope.
- An *instruction* is an equation to run, and a *piece* is a number of consecutive
  instructions that are compiled together.
"""
