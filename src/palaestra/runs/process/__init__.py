"""Processes of runs: the watchdog beside each attempt, child processes, interpreters, resource usage."""
