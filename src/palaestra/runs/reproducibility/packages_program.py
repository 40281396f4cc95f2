"""Prints the version of the interpreter and its packages as one line of JSON. A program without dependencies."""

from __future__ import annotations

import json
import platform
import sys
from importlib import metadata


def describe(distribution: metadata.Distribution) -> str:
    """`name==version`, with the place of an editable or directly installed package."""
    name, version = distribution.metadata["Name"], distribution.version
    try:
        direct = json.loads(distribution.read_text("direct_url.json") or "{}")
    except ValueError:
        direct = {}
    url = direct.get("url", "")
    commit = direct.get("vcs_info", {}).get("commit_id", "")
    if direct.get("dir_info", {}).get("editable"):
        return f"{name}=={version} # editable {url}"
    return f"{name} @ {url}{'@' + commit if commit else ''}" if url else f"{name}=={version}"


def main() -> None:
    """Print the facts."""
    packages = set()
    for distribution in metadata.distributions():
        try:
            packages.add(describe(distribution))
        except Exception:  # noqa: BLE001 - one damaged package must not hide the others
            continue
    facts = {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "packages": sorted((name for name in packages if name), key=str.lower),
    }
    print(json.dumps(facts))  # noqa: T201


if __name__ == "__main__":
    main()
