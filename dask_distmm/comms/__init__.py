"""How matrices travel between workers. `dask` uses Dask's own comms (TCP, TLS, UCX or in process)."""
