"""How two runs differ: configuration, code and environment."""
