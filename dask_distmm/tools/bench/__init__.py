"""Parts that benchmarks share: the protocol of a measured engine, the order of the rounds, the report; three engines.

``dask distmm bench`` is made of it, and so are the larger benchmarks of the repository, which bring further peers.
"""
