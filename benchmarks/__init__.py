"""Measurements of Palaestra beside others, each reproducible with one `make` word. Nothing here is installed."""
