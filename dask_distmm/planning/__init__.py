"""Planning, without I/O: ``plan(problem, roster)`` returns one frozen `Plan`.

`computation` has what all kinds of computations have in common, and who takes part; `problem` says what is multiplied
and cuts parts out of it, `plan` how. `model` has what each engine can do, and the one roofline by which all work is
estimated; modules of engines' names have their work and their memory, `schedule` the order of a rank's work by `peer`.
`cuts` are the ways to cut a product, also by the workers that hold its chunks, `distribution` the layouts that can be
asked for, `footprint` what ranks need and hold, `planner` the choice, `tasks` the work of Dask's own tasks. `waves` and
`many` plan sequences of products, `program` plans programs, `wire` has the form in which all of these cross the
network.
"""

from dask_distmm.planning.computation import Chunks, Computation, Demand, Output, Worker
from dask_distmm.planning.cublasmp import CUBLASMP
from dask_distmm.planning.cusolvermp import CUSOLVERMP
from dask_distmm.planning.many import Batch, BatchEstimate, BatchPlan, GroupPlan, Share
from dask_distmm.planning.model import ENGINES, EngineModel, Estimate, register
from dask_distmm.planning.numpy import NUMPY, NumpyModel
from dask_distmm.planning.peer import PEER
from dask_distmm.planning.placement import EVERYWHERE, Explanation, Placement, everywhere
from dask_distmm.planning.plan import Plan
from dask_distmm.planning.planner import plan, plan_computation, plan_from_wire, problem_from_wire
from dask_distmm.planning.problem import METHODS, Extra, Problem, restrict

__all__ = [
    "ENGINES",
    "EVERYWHERE",
    "METHODS",
    "Batch",
    "BatchEstimate",
    "BatchPlan",
    "Chunks",
    "Computation",
    "Demand",
    "EngineModel",
    "Estimate",
    "Explanation",
    "Extra",
    "GroupPlan",
    "NumpyModel",
    "Output",
    "Placement",
    "Plan",
    "Problem",
    "Share",
    "Worker",
    "everywhere",
    "plan",
    "plan_computation",
    "plan_from_wire",
    "problem_from_wire",
    "register",
    "restrict",
]

# In the order in which they are preferred: GPUs that read each other's memory, other GPUs, CPUs.
for _model in (PEER, CUBLASMP, CUSOLVERMP, NUMPY):
    register(_model)
