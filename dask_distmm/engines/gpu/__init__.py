"""The parts that the engines on GPUs have in common.

`copy_kernels` copy many rectangles at once, `host` moves NumPy chunks to the device and back, `operands` brings chunks
into the type that is multiplied, `gemm` calls cuBLAS and cuBLASLt on one GPU, `products` has the kernels beside that.
`lapack` has the kernels of factorizations, `tridiagonal` those of eigenvalues that ranks share; their CUDA sources are
the files ``*.cu``. `program` is what all jobs of programs do.
"""
