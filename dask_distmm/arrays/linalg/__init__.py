"""Linear algebra beyond the product on Dask arrays: `factorize` makes the graph of one run, others use it."""
