"""`palaestra runs`: commands that read runs need no service; those that change runs start one if needed."""
