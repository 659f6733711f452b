"""Engines do the multiplying. `base` has the base classes; `numpy` runs on CPUs, on the chunks as they lie."""
