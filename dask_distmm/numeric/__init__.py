"""Types, conversions between them, and the arithmetic of epilogs. Pure."""
