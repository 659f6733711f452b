"""Random programs: what they compute is what NumPy computes, on one to five ranks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from traced_programs import check_program
from tracing_ranks import on_ranks


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**40), st.integers(1, 5))
def test_on_ranks(seed, ranks):
    check_program(seed, ranks, lambda program, lazy, ranks: on_ranks(lambda *x: program(*x), *lazy, ranks=ranks))
