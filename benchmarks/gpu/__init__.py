"""The GPU benchmark: ``python -m benchmarks.gpu``."""
