"""Starts the SPADE-BDI worker: `train` trains, `act` is the policy of a play, `check` checks plans and environment.

Runs by path in an interpreter that has spade-bdi. The worker is the directory `bdi` beside this file. It is no package
of palaestra, because `agent`, `actions` and `xmpp` in it need agentspeak (GPL) and spade, which are never installed
beside palaestra.
"""

from __future__ import annotations

import importlib
import sys

_COMMANDS = {"train": "training", "act": "acting", "check": "checking"}

if __name__ == "__main__":
    # The directory of this file is on the path, so the package beside it is `bdi`.
    sys.exit(importlib.import_module(f"bdi.{_COMMANDS[sys.argv[1]]}").main(sys.argv[2:]))
