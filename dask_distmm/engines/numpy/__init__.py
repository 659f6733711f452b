"""The engine for CPUs."""
