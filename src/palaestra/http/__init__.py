"""Shared parts of the HTTP servers: sockets, allowed host names and strict JSON bodies."""
