"""Engines do the multiplying. `base` has the base classes; `numpy` runs on CPUs, the others on GPUs."""
