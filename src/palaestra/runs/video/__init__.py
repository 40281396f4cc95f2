"""Short video clips of checkpoints, recorded and encoded in separate processes."""
