"""The runner `script`: any program, started as it would be in the user's shell."""

from palaestra.runs.runners.script.runner import ScriptRunner

__all__ = ["ScriptRunner"]
