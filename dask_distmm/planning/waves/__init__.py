"""A product that does not fit into memory as a sequence of runs, waves, each of which does. Pure.

::

    sums       D is in memory and grows: wave w adds A[:, kw] @ B[kw, :] to what wave w - 1 has left
    rows       B is in memory: wave w makes some rows of chunks of D of those of A
    cols       A is in memory: wave w makes some columns of chunks of D of those of B
    blocks     neither fits, nor does D: block by block of D, each in waves along k; operands are read again for each
    host       A and B are in host memory, and D does not fit on the GPUs: block by block of D, each in one wave

While wave w is multiplied the inputs of wave w + 1 are loaded, and no more: two waves' inputs are in memory, what the
run itself takes, and what stays. A wave is as large as these leave room for; each is an ordinary `Problem`.
"""

from dask_distmm.planning.waves.choice import Budget, choose_scheme, in_host, in_host_memory
from dask_distmm.planning.waves.scheme import Scheme, Wave, WavePlan, part_scheme, wave_problem

__all__ = [
    "Budget",
    "Scheme",
    "Wave",
    "WavePlan",
    "choose_scheme",
    "in_host",
    "in_host_memory",
    "part_scheme",
    "wave_problem",
]
