"""Dask arrays before and after a run: the request of a user, parsed and checked, and its result."""
