"""Sessions on this machine: `LocalRuntime` runs session servers as child processes, each under a `process_guard`."""
