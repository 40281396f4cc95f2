"""`palaestra datasets`: list, show, create, import, download, verify and prune datasets to learn from."""
