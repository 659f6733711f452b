"""Planning, without I/O: ``plan(problem, roster)`` returns one frozen `Plan`.

`computation` has what all kinds of computations have in common, and who takes part; `problem` says what is multiplied,
in which layouts, and cuts parts out of it, `plan` how. `model` has what each engine can do, and the one roofline by
which all work is estimated; modules of engines' names have their work and their memory, `schedule` the order of a
rank's work by `peer`. `cuts` are the ways to cut a product, also by the workers that hold its chunks, `footprint` what
ranks need and hold, `planner` the choice, with the work of Dask's own tasks. `waves` and `many` plan sequences of
products, `program` plans programs, `wire` has the form in which all of these cross the network.
"""

from dask_distmm.planning.computation import Chunks as Chunks
from dask_distmm.planning.computation import Computation as Computation
from dask_distmm.planning.computation import Demand as Demand
from dask_distmm.planning.computation import NamedMatrix as NamedMatrix
from dask_distmm.planning.computation import Worker as Worker
from dask_distmm.planning.cublasmp import CUBLASMP
from dask_distmm.planning.many import Batch as Batch
from dask_distmm.planning.many import BatchPlan as BatchPlan
from dask_distmm.planning.many import GroupPlan as GroupPlan
from dask_distmm.planning.many import Share as Share
from dask_distmm.planning.model import ENGINES as ENGINES
from dask_distmm.planning.model import register
from dask_distmm.planning.numpy import NUMPY
from dask_distmm.planning.numpy import NumpyModel as NumpyModel
from dask_distmm.planning.peer import NCCL, PEER
from dask_distmm.planning.placement import EVERYWHERE as EVERYWHERE
from dask_distmm.planning.placement import Placement as Placement
from dask_distmm.planning.plan import Plan as Plan
from dask_distmm.planning.planner import plan as plan
from dask_distmm.planning.planner import plan_computation as plan_computation
from dask_distmm.planning.planner import plan_from_wire as plan_from_wire
from dask_distmm.planning.planner import problem_from_wire as problem_from_wire
from dask_distmm.planning.problem import METHODS as METHODS
from dask_distmm.planning.problem import Problem as Problem
from dask_distmm.planning.problem import restrict as restrict
from dask_distmm.shown import Explanation as Explanation

# In the order in which they are preferred: GPUs that read each other's memory, other GPUs, CPUs.
for _model in (PEER, CUBLASMP, NCCL, NUMPY):
    register(_model)
