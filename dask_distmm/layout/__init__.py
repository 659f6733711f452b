"""Where the elements of a matrix live, and which of them must move when that changes.

Pure arithmetic on NumPy index arrays: nothing here knows of Dask, workers or networks, and nothing here
touches matrix data.  A two-dimensional layout is the product of two one-dimensional ones, so the modules
build on one another in this order:

- `redistribute`: one dimension cut into segments; a layout, its product with another one: chunks, slabs, blocks
  round-robin; the copies which turn one layout into another, also as one table with sender and receiver of each;
- `rectangles`: tables of rectangles for the kernels that copy.
"""

from dask_distmm.layout.redistribute import Axis as Axis
from dask_distmm.layout.redistribute import AxisCopies as AxisCopies
from dask_distmm.layout.redistribute import Copy as Copy
from dask_distmm.layout.redistribute import Layout as Layout
from dask_distmm.layout.redistribute import Moves as Moves
from dask_distmm.layout.redistribute import ProcessGrid as ProcessGrid
from dask_distmm.layout.redistribute import intersect as intersect
from dask_distmm.layout.redistribute import redistribution as redistribution
