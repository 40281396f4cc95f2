"""Sweeps: many configurations, each with several seeds, as one object that survives the service."""
