"""What the engine `cusolvermp` can do, and what that costs."""
