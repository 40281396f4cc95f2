"""The HTTP server that creates, leases, proxies and reaps UI sessions. Never imports torch."""
