"""Programs that other interpreters run by path. They do not import palaestra."""
