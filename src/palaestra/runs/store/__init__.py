"""The registry: what all runs are at a glance, in one SQLite file that can be rebuilt from the run directories."""
