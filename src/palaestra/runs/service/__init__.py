"""The run service: an HTTP server around one supervisor."""
