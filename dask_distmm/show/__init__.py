"""Plans as text, HTML and SVG. Importing it says how plans are shown."""

from dask_distmm.arrays.product import NotCollective
from dask_distmm.planning.display import register
from dask_distmm.planning.many.batches import BatchPlan
from dask_distmm.planning.many.groups import GroupPlan
from dask_distmm.planning.plan import Plan
from dask_distmm.show.html import batch_html, group_html, plan_html, reason_html
from dask_distmm.show.text import batch_text, group_text, plan_text, reason_text

register(NotCollective, reason_text, lambda made: reason_html(made.reason))
register(Plan, plan_text, plan_html)
register(BatchPlan, batch_text, batch_html)
register(GroupPlan, group_text, group_html)
