"""Plans as text, HTML and SVG. Importing it says how plans are shown."""

from dask_distmm.arrays.product import NotCollective
from dask_distmm.planning.factor import FactorPlacement
from dask_distmm.planning.many import BatchPlan, ChainPlan, GroupPlan
from dask_distmm.planning.placement import register_forms
from dask_distmm.planning.plan import Plan
from dask_distmm.planning.program import ProgramPlacement
from dask_distmm.planning.waves import WavePlan
from dask_distmm.show.html import (
    batch_html,
    chain_html,
    factor_html,
    group_html,
    plan_html,
    program_html,
    reason_html,
    waves_html,
)
from dask_distmm.show.text import (
    batch_text,
    chain_text,
    factor_text,
    group_text,
    plan_text,
    program_text,
    reason_text,
    waves_text,
)

register_forms(NotCollective, reason_text, lambda made: reason_html(made.reason))
register_forms(Plan, plan_text, plan_html)
register_forms(BatchPlan, batch_text, batch_html)
register_forms(GroupPlan, group_text, group_html)
register_forms(FactorPlacement, factor_text, factor_html)
register_forms(ProgramPlacement, program_text, program_html)
register_forms(ChainPlan, chain_text, chain_html)
register_forms(WavePlan, waves_text, waves_html)
