"""Clients of session servers and gateways, and `SessionProvider`, which opens the sessions of a run."""
