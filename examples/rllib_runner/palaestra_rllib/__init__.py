"""A runner of RLlib as a package of its own: the template of runners for other libraries."""
