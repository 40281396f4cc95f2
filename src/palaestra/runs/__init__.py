"""The run service: run specs, registry, child processes, supervisor, runners. Never imports torch."""
