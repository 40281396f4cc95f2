"""The checkpoint format: a directory of safetensors and JSON files, written atomically and verified when opened.

    update_00000120/
        policy.safetensors      vector environments: the policy, for `policy.load_policy`
        policy/                 screens: the layout of PEFT or transformers
        learner.safetensors     tensors of the learner: optimiser, replay, random states
        source.safetensors      tensors of the experience source: states of environments, or waiting episodes
        state.json              {"learner": …, "source": …, "progress": {"updates", "steps", …}, "about": {"config", …}}
        manifest.json           schema, kind, and size and SHA-256 of every other file; written last

Nothing is pickled. Schema 1 can still be read; its `state` is converted to the sections above.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from palaestra.errors import CheckpointError
from palaestra.files.atomic import atomic_directory, read_json

SCHEMA = 2
Kind: TypeAlias = Literal["vector", "screens"]
POLICY: dict[Kind, str] = {"vector": "policy.safetensors", "screens": "policy"}
LEARNER, SOURCE, STATE, MANIFEST = "learner.safetensors", "source.safetensors", "state.json", "manifest.json"

_PLACE = "checkpoint"
_REMEDY = "Use an earlier checkpoint"
FOREIGN_REMEDY = "It acts in plays (palaestra studio), and records data with palaestra datasets create --checkpoint"
_READ_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError)


class FileDigest(NamedTuple):
    """SHA-256 and size of a file."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    path: Path
    kind: Kind
    schema: int
    sha256: str
    """SHA-256 of the manifest, which has the SHA-256 of all files."""
    state: dict[str, Any]

    def read(self, name: str) -> bytes:
        """The content of one file."""
        return (self.path / name).read_bytes()


def write_checkpoint(path: Path, contents: Mapping[str, bytes | Callable[[Path], object]], *, kind: Kind) -> str:
    """Write a checkpoint to `path` (which must not exist) and return its SHA-256.

    A callable gets the path of its file or directory and writes it.
    """
    if path.exists():
        raise CheckpointError(_PLACE, str(path), "exists and is never overwritten", "Choose another name")
    with atomic_directory(path) as directory:
        for name, content in contents.items():
            if callable(content):
                content(directory / name)
            else:
                (directory / name).write_bytes(content)
        manifest = {"schema": SCHEMA, "kind": kind, "files": digest_files(directory)}
        raw = json.dumps(manifest, indent=1).encode()
        (directory / MANIFEST).write_bytes(raw)
    return hashlib.sha256(raw).hexdigest()


def open_checkpoint(path: Path, *, kind: Kind | None = None) -> Checkpoint:
    """Verify a checkpoint; `CheckpointError` if it is incomplete, altered, of a newer schema or of another kind."""
    if not path.is_dir():
        raise CheckpointError(_PLACE, str(path), "there is no such checkpoint directory")
    try:
        raw = (path / MANIFEST).read_bytes()
        schema = int(json.loads(raw)["schema"])
        if schema > SCHEMA:
            raise CheckpointError(_PLACE, str(path), f"schema {schema} is newer than {SCHEMA}", "Upgrade palaestra")
        if schema < 1:
            raise ValueError(f"schema {schema} does not exist")
        manifest_kind = _manifest_kind(raw)
        if manifest_kind is None:
            writer = json.loads(raw)["kind"]
            raise CheckpointError(_PLACE, str(path), f"was written by {writer!r}, not by palaestra", FOREIGN_REMEDY)
        files = manifest_files(raw, path)
    except _READ_ERRORS as error:
        raise CheckpointError(_PLACE, str(path), f"its manifest cannot be read ({error})", _REMEDY) from None
    if kind is not None and kind != manifest_kind:
        verb = "is not" if kind == "screens" else "is"
        raise CheckpointError(_PLACE, str(path), f"{verb} of a model that operates screens", "Use another checkpoint")
    for name in _required_files(schema, manifest_kind):
        if name not in files:
            raise CheckpointError(_PLACE, str(path), f"{name} is not listed in its manifest", _REMEDY)
    check_files(path, files)
    try:
        state = _convert_state(json.loads((path / STATE).read_bytes()), schema, manifest_kind)
        _check_sections(state)
    except _READ_ERRORS as error:
        raise CheckpointError(_PLACE, str(path), f"its {STATE} cannot be used ({error})", _REMEDY) from None
    return Checkpoint(path, manifest_kind, schema, hashlib.sha256(raw).hexdigest(), state)


def check_files(path: Path, files: Mapping[str, FileDigest]) -> None:
    """Raise `CheckpointError` if one of the files is missing or altered."""
    for name, expected in files.items():
        try:
            actual = digest_file(path / name)
        except OSError as error:
            raise CheckpointError(_PLACE, str(path), f"{name} is missing ({error.strerror})", _REMEDY) from None
        except ValueError as error:
            raise CheckpointError(_PLACE, str(path), str(error), _REMEDY) from None
        if actual.size_bytes != expected.size_bytes:
            problem = "is truncated" if actual.size_bytes < expected.size_bytes else "is too long"
            reason = f"{name} {problem} ({actual.size_bytes} of {expected.size_bytes} bytes)"
            raise CheckpointError(_PLACE, str(path), reason, _REMEDY)
        if actual.sha256 != expected.sha256:
            raise CheckpointError(_PLACE, str(path), f"{name} is corrupt (its SHA-256 differs)", _REMEDY)


def is_intact(path: Path) -> bool:
    """Whether every file in the manifest exists and has its SHA-256."""
    try:
        files = manifest_files((path / MANIFEST).read_bytes(), path)
        return bool(files) and all(digest_file(path / name) == expected for name, expected in files.items())
    except (OSError, ValueError):
        return False


def list_checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints in a directory, oldest first."""
    paths = [path.parent for path in directory.glob(f"*/{MANIFEST}") if not path.parent.name.startswith(".")]
    return sorted(paths, key=lambda path: path.name)


def checkpoint_kind(path: Path) -> Kind | None:
    """The kind of a checkpoint, without verifying it; None if it cannot be read."""
    try:
        return _manifest_kind((path / MANIFEST).read_bytes())
    except _READ_ERRORS:
        return None


def read_state(path: Path) -> dict[str, Any] | None:
    """The state of a checkpoint, without verifying it; None if it cannot be read."""
    state, manifest = read_json(path / STATE), read_json(path / MANIFEST)
    kind = checkpoint_kind(path)
    if state is None or manifest is None or kind is None:
        return None
    return _convert_state(state, manifest.get("schema", 1), kind)


def digest_file(path: Path) -> FileDigest:
    """The digest of a file. `OSError` if it cannot be read, `ValueError` if it is not a regular file."""
    # Non-blocking, because opening a named pipe would wait for a writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError(f"{path} is not a file")
        return FileDigest(hashlib.file_digest(file, "sha256").hexdigest(), facts.st_size)


def digest_files(directory: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file below a directory, in the format of a manifest."""
    digests = {
        path.relative_to(directory).as_posix(): digest_file(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    return {name: {"bytes": entry.size_bytes, "sha256": entry.sha256} for name, entry in digests.items()}


def manifest_files(raw: bytes, path: Path) -> dict[str, FileDigest]:
    """The files in the manifest of a checkpoint; `ValueError` if there are none, or for a name outside `path`."""
    files = read_digests(raw)
    manifest = json.loads(raw)
    return files | _schema_1_policy_files(manifest, path) if manifest.get("schema") == 1 else files


def read_digests(raw: bytes) -> dict[str, FileDigest]:
    """The `files` of a manifest; `ValueError` if they are missing or invalid."""
    try:
        listed = json.loads(raw)["files"].items()
        files = {str(name): FileDigest(str(entry["sha256"]), int(entry["bytes"])) for name, entry in listed}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the manifest lists no files ({error})") from None
    for name in files:
        parts = name.split("/")
        if name.startswith("/") or "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"the manifest names {name!r}, which is not a file of the checkpoint")
    return files


def _manifest_kind(raw: bytes) -> Kind | None:
    """What a checkpoint was trained on; None if another program wrote it."""
    # Schema 1 used "ui" for screens and had no kind for vector environments.
    kinds: dict[str, Kind] = {"vector": "vector", "screens": "screens", "ui": "screens"}
    return kinds.get(str(json.loads(raw).get("kind", "vector")))


def _check_sections(state: Any) -> None:
    """Raise `ValueError` if sections or counters are missing; correct digests do not ensure that."""
    if not isinstance(state, dict):
        raise ValueError(f"it is a {type(state).__name__}")
    for section in ("learner", "source", "progress", "about"):
        if not isinstance(state.get(section), dict):
            raise ValueError(f"it has no section {section}")
    for counter in ("updates", "steps"):
        if type(state["progress"].get(counter)) is not int:
            raise ValueError(f"progress.{counter} is {state['progress'].get(counter)!r}, which is not a count")


def _required_files(schema: int, kind: Kind) -> list[str]:
    policy = [POLICY[kind]] if kind == "vector" else []
    if schema == 1:
        return [*policy, LEARNER, STATE] if kind == "vector" else [LEARNER, SCHEMA_1_WAITING, STATE]
    return [*policy, LEARNER, SOURCE, STATE]


# ---------------------------------------------------------------------- schema 1

SCHEMA_1_WAITING = "waiting.safetensors"
"""The waiting episodes in schema 1."""


def _schema_1_policy_files(manifest: dict[str, Any], path: Path) -> dict[str, FileDigest]:
    """The files of the policy directory; schema 1 lists only the SHA-256 of the manifest inside it."""
    if "policy" not in manifest:
        return {}
    name = f"{POLICY['screens']}/palaestra.json"
    try:
        raw = (path / name).read_bytes()
        listed = {f"{POLICY['screens']}/{inner}": digest for inner, digest in read_digests(raw).items()}
    except (OSError, ValueError):
        raw, listed = b"", {}
    return {name: FileDigest(str(manifest["policy"]), len(raw)), **listed}


def _convert_state(state: dict[str, Any], schema: int, kind: Kind) -> dict[str, Any]:
    """The state in the sections of the newest schema."""
    if schema != 1:
        return state

    def select(**names: str) -> dict[str, Any]:
        return {new: state[old] for new, old in names.items() if old in state}

    about = dict(state.get("about") or {})
    if kind == "screens":
        progress = select(updates="rounds", steps="episodes", episodes="episodes")
        source = select(orders="orders", ready="ready")
        return {"learner": state.get("trainer", {}), "source": source, "progress": progress, "about": about}
    learner = ("n_updates", "adam_steps", "shuffle")
    recent = ("episode_rewards", "episode_lengths", "episode_successes", "planned_timesteps")
    progress = select(updates="n_updates", steps="total_timesteps", episodes="num_episodes", **{k: k for k in recent})
    return {
        "learner": select(**{name: name for name in learner}),
        "source": state.get("collector", {}),
        "progress": progress,
        "about": about,
    }
