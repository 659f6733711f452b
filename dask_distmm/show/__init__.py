"""Plans as text, HTML and SVG."""

from collections.abc import Callable
from typing import Any

from dask_distmm.arrays.product import NotCollective
from dask_distmm.planning.factor import FactorPlacement
from dask_distmm.planning.many import BatchPlan, ChainPlan, GroupPlan
from dask_distmm.planning.plan import Plan
from dask_distmm.planning.program import ProgramPlacement
from dask_distmm.planning.waves import WavePlan
from dask_distmm.show import html, text
from dask_distmm.shown import Forms


def _plan_page(sections: Callable[[Any], list[str]]) -> Callable[[Any], str]:
    """Return what makes the page of a plan: the first line of its text, sections, and all of its text."""
    return lambda plan: html.page(repr(plan).splitlines()[0], sections(plan), repr(plan))


FORMS: dict[type, Forms] = {
    NotCollective: (lambda plan: f"Dask's own matmul would run: {plan.reason}", html.reason_html),
    Plan: (text.plan_text, _plan_page(html.plan_html)),
    BatchPlan: (text.batch_text, _plan_page(html.batch_html)),
    GroupPlan: (text.group_text, _plan_page(html.group_html)),
    FactorPlacement: (text.factor_text, _plan_page(html.factor_html)),
    ProgramPlacement: (text.program_text, _plan_page(html.program_html)),
    ChainPlan: (text.chain_text, _plan_page(html.chain_html)),
    WavePlan: (text.waves_text, _plan_page(html.waves_html)),
}
