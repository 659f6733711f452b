"""Planning, without I/O: ``plan(problem, roster)`` returns one frozen `Plan`.

`problem` what is multiplied, `plan` how; `methods` and `cuts` the ways to cut it, `memory` what each
would hold, `planner` what each would take and the choice, `replicas` what keeping all of D everywhere adds, `show` the
plan as text. `part` cuts out of a problem what is left of it. `batches` and `shares` do the same for many products at
once.
"""

from dask_distmm.planning.cublasmp.abilities import CUBLASMP
from dask_distmm.planning.demand import Demand, Worker
from dask_distmm.planning.engines import ENGINES, Abilities, register
from dask_distmm.planning.many.batches import Batch, BatchEstimate, BatchPlan
from dask_distmm.planning.many.groups import GroupPlan, Share
from dask_distmm.planning.numpy import NUMPY
from dask_distmm.planning.peer.abilities import PEER
from dask_distmm.planning.plan import EVERYWHERE, Estimate, Packing, Plan, everywhere
from dask_distmm.planning.planner import plan
from dask_distmm.planning.problem import METHODS, Chunks, Extra, Problem
from dask_distmm.planning.restriction import restrict

__all__ = [
    "ENGINES",
    "EVERYWHERE",
    "METHODS",
    "Abilities",
    "Batch",
    "BatchEstimate",
    "BatchPlan",
    "Chunks",
    "Demand",
    "Estimate",
    "Extra",
    "GroupPlan",
    "Packing",
    "Plan",
    "Problem",
    "Share",
    "Worker",
    "everywhere",
    "plan",
    "register",
    "restrict",
]

# In the order in which they are preferred: GPUs that read each other's memory, other GPUs, CPUs.
for _abilities in (PEER, CUBLASMP, NUMPY):
    register(_abilities)
