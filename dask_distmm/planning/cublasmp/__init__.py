"""What the engine `cublasmp` does for a plan, and what that costs: tiles and their grids. Pure."""
