"""The engine for GPUs of one host that can read each other's memory: no rank sends, each pulls what it needs."""
