"""How matrices travel between workers.

`base` is the protocol, `nccl` moves device memory between the ranks of a collective, `serializers` lets types travel
over Dask's own comms (TCP, TLS, UCX or in process), which `dask_distmm.runtime.worker` uses.
"""
