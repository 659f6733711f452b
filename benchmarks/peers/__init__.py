"""The engines that are measured, one module each; see `dask_distmm.bench.protocol.Peer`."""
