"""The package's version, the one place."""

__version__ = "0.1.0"
