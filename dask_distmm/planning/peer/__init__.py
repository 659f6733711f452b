"""What the engine `peer` does for a plan, and what that costs: which blocks are pulled, and in which order. Pure."""
