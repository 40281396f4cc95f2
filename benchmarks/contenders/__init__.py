"""One module per contender. Each runs as its own process and prints one line of JSON (see `benchmarks.meter`)."""
