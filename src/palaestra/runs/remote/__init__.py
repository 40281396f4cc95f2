"""Runs on other machines: over SSH and as Ray jobs. The same watchdog runs there; its files are mirrored here."""
