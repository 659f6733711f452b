"""Where the elements of a matrix live, and which of them must move when that changes.

Pure arithmetic on NumPy index arrays: nothing here knows of Dask, workers or networks, and nothing here
touches matrix data.  A two-dimensional layout is the product of two one-dimensional ones, so the modules
build on one another in this order:

- `axis`: one dimension cut into segments, and how two such cuts intersect;
- `chunkgrid`: Dask's layout, a grid of chunks of any sizes; ScaLAPACK's, over processes in rows and columns;
- `redistribute`: the copies which turn one layout into another, also as one table with sender and receiver of each;
- `rectangles`: tables of rectangles for the kernels that copy.
"""

from dask_distmm.layout.axis import Axis, AxisCopies, intersect
from dask_distmm.layout.chunkgrid import BlockCyclicLayout, ChunkGrid, ProcessGrid, numroc
from dask_distmm.layout.redistribute import Copies, Copy, Distribution, Legs, Moves, redistribution

__all__ = [
    "Axis",
    "AxisCopies",
    "BlockCyclicLayout",
    "ChunkGrid",
    "Copies",
    "Copy",
    "Distribution",
    "Legs",
    "Moves",
    "ProcessGrid",
    "intersect",
    "numroc",
    "redistribution",
]
