"""Many products at once: batches and groups. Pure."""
