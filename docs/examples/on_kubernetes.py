"""One collective multiply on workers that Dask's operator starts on Kubernetes, by dask-kubernetes.

``python docs/examples/on_kubernetes.py --image registry/dask-distmm:1`` where the operator runs, with an image in which
dask_distmm is installed. ``--print`` prints the resource, for ``kubectl apply -f -``.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from dask_kubernetes.operator import KubeCluster, make_cluster_spec
from distributed import Client
from product import multiply

# Dask reads these as configuration; they are for the scheduler and for the workers.
PRELOAD = {
    "DASK_DISTRIBUTED__SCHEDULER__PRELOAD": '["dask_distmm"]',
    "DASK_DISTRIBUTED__WORKER__PRELOAD": '["dask_distmm"]',
}


def resource(image: str, workers: int, name: str = "distmm") -> dict[str, Any]:
    """Return a DaskCluster: requests are limits, so that a worker's memory is its own."""
    size = {"cpu": "2", "memory": "4Gi"}
    made = make_cluster_spec(
        name=name,
        image=image,
        n_workers=workers,
        env=PRELOAD,
        resources={"requests": size, "limits": size},
        # A worker that lost its scheduler ends, and its pod is started again.
        worker_command="dask worker --death-timeout 60",
    )
    # dask-kubernetes 2026.3 starts "dask-scheduler", which Dask no longer has.
    made["spec"]["scheduler"]["spec"]["containers"][0]["args"] = ["dask", "scheduler", "--host", "0.0.0.0"]
    return made


def main() -> None:
    """Start a cluster and multiply, or print what would be started."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image", required=True)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--print", action="store_true", help="print the resource as JSON, which kubectl takes")
    options = parser.parse_args()
    spec = resource(options.image, options.workers)
    if options.print:
        print(json.dumps(spec, indent=2))
        return
    with KubeCluster(custom_cluster_spec=spec) as cluster, Client(cluster) as client:
        multiply(client, options.workers)


if __name__ == "__main__":
    main()
