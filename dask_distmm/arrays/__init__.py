"""Dask arrays before and after a run: what a user asks for, parsed and checked; and what comes back."""
