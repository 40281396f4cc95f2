"""Archiving, deleting and restoring runs, and the retention policy."""
