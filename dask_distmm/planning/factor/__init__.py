"""Factorizations and solves as programs of steps on block columns. Pure, and the same for all engines.

`problem` says what is computed, `columns` which rank has which block column, `steps` what a step is, `phases` which
panels are applied to which block columns, in which order; `lookahead` turns phases into each rank's steps; `plan` puts
them together.
"""
