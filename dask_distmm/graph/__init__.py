"""The graph of a product: the barrier, and the chunks of D."""
