"""The runner `corl`: unmodified scripts of the user's CORL checkout, on a local dataset."""

from palaestra.runs.runners.corl.runner import CorlRunner

__all__ = ["CorlRunner"]
