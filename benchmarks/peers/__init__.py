"""The engines that are measured, one module each; see `dask_distmm.tools.bench.protocol.Peer`."""
