"""Planning, without I/O: ``plan(problem, roster)`` returns one frozen `Plan`.

`problem` what is multiplied, `plan` how; `methods` and `cuts` the ways to cut it, `memory` what each
would hold, `planner` what each would take and the choice, `show` the plan as text.
"""

from dask_distmm.plan.plan import Estimate, Packing, Plan
from dask_distmm.plan.planner import plan
from dask_distmm.plan.problem import METHODS, Chunks, Extra, Problem, Worker

__all__ = ["METHODS", "Chunks", "Estimate", "Extra", "Packing", "Plan", "Problem", "Worker", "plan"]
