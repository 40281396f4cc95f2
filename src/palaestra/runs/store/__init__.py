"""The registry: an index of all runs in one SQLite file that can be rebuilt from the run directories."""
