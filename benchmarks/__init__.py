"""Benchmarks of distributed matrix multiplication, side by side with its peers."""
