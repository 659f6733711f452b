"""Planning, without I/O: ``plan(problem, roster)`` returns one frozen `Plan`.

`problem` says what is multiplied and cuts parts out of it, `demand` by whom, `plan` how. `cuts` are the ways to cut a
product, `assignment` and `distribution` the layouts that were asked for, `footprint` the memory of each way, `planner`
the choice, with what each rank needs and replicas. `engines` has the abilities of each engine; folders of their names
have their costs. `chunk_order` takes chunks in the order of their holders, `many` plans many products at once,
`program` plans programs.
"""

from dask_distmm.planning.computation import Chunks, Computation, Output
from dask_distmm.planning.computation_kinds import plan_computation, plan_from_wire, problem_from_wire
from dask_distmm.planning.cublasmp.model import CUBLASMP
from dask_distmm.planning.cusolvermp import CUSOLVERMP
from dask_distmm.planning.demand import Demand, Worker
from dask_distmm.planning.many import Batch, BatchEstimate, BatchPlan, GroupPlan, Share
from dask_distmm.planning.model import ENGINES, EngineModel, Estimate, register
from dask_distmm.planning.numpy import NUMPY, NumpyModel
from dask_distmm.planning.peer.model import PEER
from dask_distmm.planning.placement import EVERYWHERE, Explanation, Placement, everywhere
from dask_distmm.planning.plan import Packing, Plan
from dask_distmm.planning.planner import plan
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
    "Packing",
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
