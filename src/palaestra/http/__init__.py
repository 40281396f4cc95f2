"""Shared parts of the HTTP servers: sockets, allowed host names, strict JSON bodies and ASGI helpers."""
