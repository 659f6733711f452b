"""The GPU benchmark: ``python -m benchmarks.gpu``, from the root of the repository, on a host with N GPUs.

========  =====================================================================================================
cublas    the bound: each GPU multiplies its part of the product alone, all at the same time
nvmath    nvmath-python's distributed matmul (cuBLASMp) on slabs, planned once
torch     PyTorch's fused all-gather + matmul and matmul + reduce-scatter over symmetric memory
jax       ``jax.jit`` of a matmul over a mesh of all GPUs
distmm    ``dask_distmm.matmul(A, B)`` on a LocalCUDACluster: one chunk a GPU, and grids of g x g chunks
peer      the same with ``engine="peer"``
cublasmp  the same with ``engine="cublasmp"``
dask      stock Dask's ``A @ B`` on the same cluster and grids
========  =====================================================================================================

``--sweep`` measures many shapes, chunks and numbers of GPUs with each engine and method, and says how far from the
best one `auto` was. ``python -m benchmarks.gpu.links`` measures pulls alone.

`team` starts, asks and kills processes; `ranks` and `mesh` have the peers without Dask, `clusters` and `matrices`
those with it; `cases` says what is measured, `report` writes it. A peer that fails is recorded and the rest goes on.
"""
