"""Palaestra, the training hall for agents: one actor-learner core, one run service and one studio.

The root exports its version and nothing else, so that importing an operations package never pulls in torch.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
