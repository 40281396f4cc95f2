"""Checkpoints of any trainer: found, hashed, compared, imported without running what is in them, and deployed."""
