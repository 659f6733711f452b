"""Users' functions on arrays as programs: traced, placed, and lowered to the steps of ranks. Pure.

A function that is written with NumPy is called once with arrays that only know their shapes and types (`arrays`). What
it does to them is recorded as *statements* on *values* (`form`), with loops, branches and calls (`control`). Then each
value gets a *placement* (`place`): along one of its axes it is in the chunks of rows that the operands are in, or all
ranks have it. A statement's family has one rule for that. What depends on all rows is a sum, or another reduction, over
ranks. Finally (`lower`) all that is local to rows between two messages becomes one pass over the rows of a rank.
"""
