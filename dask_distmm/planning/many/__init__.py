"""Many computations: batches and groups of products, and the runs of one result. Pure."""
