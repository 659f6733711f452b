"""The whole formula on the numpy engine without a cluster: any epilog, method, type, shape and chunks together."""

from __future__ import annotations

from epilog_cases import ALL, Case, run_case
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_distmm.engines.base import get_engine
from dask_distmm.errors import PlanError


@settings(max_examples=300)
@given(
    epilog=st.sampled_from(["", *ALL]),
    method=st.sampled_from(["auto", "local", "allgather", "reducescatter", "allreduce", "summa"]),
    dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
    shape=st.tuples(*[st.integers(1, 24)] * 3),
    ranks=st.tuples(st.integers(1, 5), st.integers(0, 2)),
    factors=st.tuples(st.sampled_from([1.0, -0.5]), st.sampled_from([None, 0.0, 2.0])),
    bias=st.sampled_from(["row", "column"]),
    bias_axis=st.sampled_from([-1, 0]),
)
def test_any_combination(epilog, method, dtype, shape, ranks, factors, bias, bias_axis):
    alpha, beta = factors
    case = Case(epilog, dtype, shape, alpha=alpha, beta=beta, bias=bias, bias_axis=bias_axis)
    with_c = bool(beta)
    try:
        d, aux = run_case(get_engine("numpy"), case, method, *ranks, with_c)
    except PlanError as error:
        # A method that needs more rows, columns or depth.
        if method == "auto" or "does not fit" not in str(error):
            raise
        return
    for name in ("bgrada", "bgradb"):
        case.aux.pop(name, None)  # made by Dask, not in the run
    case.check(d, aux)
