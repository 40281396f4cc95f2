"""Programs that run in interpreters of their own, by path: they import nothing of ours and do nothing on import."""
