"""Questions about many runs: which ones, how good at equal steps, and how certain."""
