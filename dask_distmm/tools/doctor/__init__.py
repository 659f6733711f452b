"""``dask distmm check``: the engine that multiplies here or on a cluster, and the commands that mend it.

`facts` collects, on every worker, and imports nothing of this package: it is sent to workers that lack it. `findings`
judges the facts, and is pure. `show` makes text of both; `examine` puts them together.
"""

from dask_distmm.tools.doctor.examine import examine
from dask_distmm.tools.doctor.show import report_text

__all__ = ["examine", "report_text"]
