"""Scripted oracles: JavaScript expressions that return the next action of a solution, for recording demonstrations.

An oracle is stateless: it looks at the page and returns the next action as JSON (`decode` of `sessions.action` reads
it), or null when nothing is left to do. `oracles.js` has the functions that oracles are written with.
"""

from __future__ import annotations

from importlib import resources

_FUNCTIONS = resources.files("palaestra.sessions.suites").joinpath("oracles.js").read_text("utf-8")


def build_oracle(script: str) -> str:
    """The expression of an oracle from the body of a function, which may use everything in `oracles.js`."""
    return f"(() => {{\n{_FUNCTIONS}\n{script}\n}})()"
