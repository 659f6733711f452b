"""The engine for GPUs that read each other's memory: each rank pulls what it needs; NCCL joins several such sets."""
