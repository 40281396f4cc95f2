"""Actors on the nodes of a Ray cluster: collectors of vector environments, players of screens, and their replacement.

The classes that run on the nodes are ordinary classes; only `palaestra.transport.ray_cluster` knows Ray.
"""
