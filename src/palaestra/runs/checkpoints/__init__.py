"""Checkpoints: listing, verifying, importing and deploying them, without torch."""
