"""``dask distmm check``: what multiplies here or on a cluster, and what to mend.

`facts` collects, on every worker, and imports nothing of this package: it is sent to workers that lack it. `findings`
judges what was collected, and is pure. `show` makes text of both; `examine` puts them together.
"""

from dask_distmm.tools.doctor.examine import examine
from dask_distmm.tools.doctor.show import text

__all__ = ["examine", "text"]
