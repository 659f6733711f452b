"""The package's version, the one place."""

__version__ = "0.2.0.dev0"

# The versions of Dask and distributed that all tests have passed with. Newer ones are taken too, as long as they have
# what `compat` looks for.
TESTED_DASK = ("2026.7.1", "2026.8.0")
