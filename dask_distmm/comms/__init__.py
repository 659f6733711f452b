"""How matrices travel between workers.

`base` is the protocol, `dask` uses Dask's own comms (TCP, TLS, UCX or in process), `nccl` moves device memory between
the ranks of a collective.
"""
