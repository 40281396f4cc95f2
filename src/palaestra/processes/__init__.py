"""Processes: their identity, memory limit, shared memory and number of threads."""
