"""The engines that are measured, one module each; see `benchmarks.harness.protocol.Contender`."""
