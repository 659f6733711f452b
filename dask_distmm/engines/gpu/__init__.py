"""The parts that both engines on GPUs use.

`kernels` copy many rectangles at once, `host` moves NumPy chunks to the device and back, `operands` brings chunks into
the type that is multiplied, `gemm` calls cuBLAS and cuBLASLt on one GPU, `finishing` applies the formula.
"""
