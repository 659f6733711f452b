"""Programs around the library: the command line, the check, the benchmark, the demo, products of files."""
