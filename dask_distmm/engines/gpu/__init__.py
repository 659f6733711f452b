"""The parts that the engines on GPUs have in common.

`copy_kernels` copy many rectangles at once, `host` moves NumPy chunks to the device and back, `operands` brings chunks
into the type that is multiplied, `gemm` calls cuBLAS and cuBLASLt on one GPU, `finishing` applies the formula. `lapack`
calls cuSOLVER on one GPU, `factor` is what all jobs of factorizations do. `gate` and `entry` lead into the calls of
libraries that all ranks make together.
"""
