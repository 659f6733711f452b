"""Programs around the library: the command line, the doctor, the benchmarks, the demo."""
