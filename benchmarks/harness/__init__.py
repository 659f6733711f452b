"""Parts that benchmarks share: the protocol of a measured engine, the order of rounds, the report, three engines."""
