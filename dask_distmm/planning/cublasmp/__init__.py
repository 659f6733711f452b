"""Plans of the engine `cublasmp`: tiles and their grids, epilogs, costs. Pure."""
