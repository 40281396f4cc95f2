"""What is on another machine, and code that is put there. A program of the standard library alone, for Python 3.7+.

    python -I -S bootstrap.py check    reads a JSON document, prints facts about the machine
    python -I -S bootstrap.py put      reads a line of JSON and an archive, and unpacks it

It is uploaded first, so that a machine without Palaestra, or with a Python that is too old for it, can say so.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from typing import Any, BinaryIO

_PROBE = """
import importlib.metadata, importlib.util, json, sys
packages = {}
for name in sys.argv[1:]:
    try:
        packages[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        packages[name] = "unknown" if importlib.util.find_spec(name) else None
print(json.dumps({"version": list(sys.version_info[:3]), "packages": packages}))
"""
_UNUSED_AFTER_S = 180 * 24 * 3600.0
"""Unpacked code and checkpoints that no run has begun with for this long are removed when others arrive."""


def check(request: dict[str, Any]) -> dict[str, Any]:
    """Facts about this machine: interpreter, packages, space, processors, clock, and which places are empty."""
    directory = os.path.abspath(os.path.expanduser(request["directory"]))
    python = os.path.expanduser(request.get("python") or sys.executable)
    existing = directory
    while not os.path.isdir(existing):
        existing = os.path.dirname(existing)
    missing = [place for place in request["places"] if not os.path.exists(os.path.join(directory, place))]
    return {
        "directory": directory,
        "executable": sys.executable,
        "version": list(sys.version_info[:3]),
        "writable": os.access(existing, os.W_OK | os.X_OK),
        "free_bytes": shutil.disk_usage(existing).free,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": _list_gpus(),
        "time": time.time(),
        "missing": missing,
        "trainer": _probe(python, request["packages"]),
    }


def put(request: dict[str, Any], stream: BinaryIO) -> dict[str, Any]:
    """Unpack an archive at a place of the directory, completely or not at all."""
    target = os.path.join(os.path.abspath(os.path.expanduser(request["directory"])), request["place"])
    parent = os.path.dirname(target)
    temporary = os.path.join(parent, f".{os.getpid()}.tmp")
    try:
        # Only the owner: the code and what it trains on may not be everyone's.
        os.makedirs(parent, mode=0o700, exist_ok=True)
        data = _read_exactly(stream, request["size"])
        if hashlib.sha256(data).hexdigest() != request["sha256"]:
            return {"error": "the archive arrived damaged"}
        # A killed process of the same number may have left one.
        shutil.rmtree(temporary, ignore_errors=True)
        os.mkdir(temporary)
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            if hasattr(tarfile, "data_filter"):
                archive.extractall(temporary, filter="data")
            else:
                archive.extractall(temporary)
        if os.path.exists(target):
            os.utime(target)
        else:
            os.rename(temporary, target)
        _remove_unused(parent, target)
        return {"ok": True}
    except OSError as error:
        return {"error": f"{parent}: {error.strerror or error}"}
    except tarfile.TarError as error:
        return {"error": str(error), "remedy": "Links must stay inside the project: exclude others with .gitignore"}
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_unused(directory: str, kept: str) -> None:
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        try:
            if path != kept and time.time() - os.stat(path).st_mtime > _UNUSED_AFTER_S:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue


def _probe(python: str, packages: list[str]) -> Any:
    try:
        done = subprocess.run(
            [python, "-c", _PROBE, *packages],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
        )
        if done.returncode == 0:
            return json.loads(done.stdout.decode())
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        return {"error": f"exit code {done.returncode}: {lines[-1] if lines else 'no output'}"}
    except subprocess.TimeoutExpired:
        return {"error": "no answer within 60 s"}
    except OSError as error:
        return {"error": error.strerror or str(error)}
    except ValueError:
        return {"error": "its answer cannot be read"}


def _list_gpus() -> list[str]:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.decode().split() if done.returncode == 0 else []


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise OSError("the connection ended before the archive was complete")
    return data


def main(verb: str) -> int:
    """Answer one request with one line of JSON."""
    stream = sys.stdin.buffer
    request = json.loads(stream.readline().decode())
    answer = check(request) if verb == "check" else put(request, stream)
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
