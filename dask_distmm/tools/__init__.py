"""Programs around the library: the command line, the check, the benchmark, constants, the demo, products of files."""
