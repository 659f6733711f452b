"""Factorizations and solves: the mathematics, the ranks, their programs. Pure, and the same for all engines.

`problem` says what is computed, `plan` which rank has which block column and puts the builders of `programs.factor`
together, `planner` chooses the ranks.
"""
