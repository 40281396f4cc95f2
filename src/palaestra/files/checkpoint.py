"""The checkpoint format: a directory of safetensors and JSON, written whole or not at all, verified when it is opened.

    update_00000120/
        policy.safetensors      vector environments: the policy, which `policy.load_policy` loads alone
        policy/                 screens: PEFT's or transformers' layout
        learner.safetensors     tensors of the learner: optimiser, replay, random streams
        source.safetensors      tensors of the experience source: positions of environments, or episodes that wait
        state.json              {"learner": …, "source": …, "progress": {"updates", "steps", …}, "about": {"config", …}}
        manifest.json           schema, kind, and size and SHA-256 of every other file; written last

Nothing is unpickled. Schema 1 is read: `state` has its facts in the sections above.
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
from palaestra.files.atomic import new_directory, read_json

__all__ = [
    "LEARNER",
    "MANIFEST",
    "POLICY",
    "SOURCE",
    "STATE",
    "WAITING",
    "Checkpoint",
    "FileDigest",
    "Kind",
    "check_files",
    "checkpoint_kind",
    "checkpoints_in",
    "digest_file",
    "digest_files",
    "is_whole",
    "manifest_files",
    "open_checkpoint",
    "read_digests",
    "read_state",
    "write_checkpoint",
]

SCHEMA = 2
Kind: TypeAlias = Literal["vector", "screens"]
POLICY: dict[Kind, str] = {"vector": "policy.safetensors", "screens": "policy"}
LEARNER, SOURCE, STATE, MANIFEST = "learner.safetensors", "source.safetensors", "state.json", "manifest.json"

_PLACE = "checkpoint"
_ANOTHER = "Use an earlier checkpoint"
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError)


class FileDigest(NamedTuple):
    """SHA-256 and size of a file."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was verified."""

    path: Path
    kind: Kind
    schema: int
    sha256: str
    """Of the manifest, hence of everything."""
    state: dict[str, Any]

    def read(self, name: str) -> bytes:
        """One of its files."""
        return (self.path / name).read_bytes()


def write_checkpoint(path: Path, contents: Mapping[str, bytes | Callable[[Path], object]], *, kind: Kind) -> str:
    """Write a checkpoint to `path` (which must not exist) and return its SHA-256.

    A callable is given the path of its file or directory and writes it.
    """
    if path.exists():
        raise CheckpointError(_PLACE, str(path), "exists already and is never overwritten", "Choose another name")
    with new_directory(path) as making:
        for name, content in contents.items():
            if callable(content):
                content(making / name)
            else:
                (making / name).write_bytes(content)
        manifest = {"schema": SCHEMA, "kind": kind, "files": digest_files(making)}
        raw = json.dumps(manifest, indent=1).encode()
        (making / MANIFEST).write_bytes(raw)
    return hashlib.sha256(raw).hexdigest()


def open_checkpoint(path: Path, *, kind: Kind | None = None) -> Checkpoint:
    """Verify a checkpoint; anything missing, altered, newer than we know or of another kind is refused."""
    if not path.is_dir():
        raise CheckpointError(_PLACE, str(path), "there is no such checkpoint directory")
    try:
        raw = (path / MANIFEST).read_bytes()
        schema = int(json.loads(raw)["schema"])
        if schema > SCHEMA:
            raise CheckpointError(_PLACE, str(path), f"schema {schema} is newer than {SCHEMA}", "Upgrade palaestra")
        if schema < 1:
            raise ValueError(f"there never was a schema {schema}")
        files, found = manifest_files(raw, path), _manifest_kind(raw)
    except _UNREADABLE as error:
        raise CheckpointError(_PLACE, str(path), f"its manifest cannot be read ({error})", _ANOTHER) from None
    if kind is not None and kind != found:
        which = "is not" if kind == "screens" else "is"
        raise CheckpointError(_PLACE, str(path), f"{which} of a model that operates screens", "Use another checkpoint")
    for name in _required_files(schema, found):
        if name not in files:
            raise CheckpointError(_PLACE, str(path), f"{name} is not listed in its manifest", _ANOTHER)
    check_files(path, files)
    try:
        state = _in_sections(json.loads((path / STATE).read_bytes()), schema, found)
        _check_sections(state)
    except _UNREADABLE as error:
        raise CheckpointError(_PLACE, str(path), f"its {STATE} cannot be used ({error})", _ANOTHER) from None
    return Checkpoint(path, found, schema, hashlib.sha256(raw).hexdigest(), state)


def check_files(path: Path, files: Mapping[str, FileDigest]) -> None:
    """Refuse a directory in which one of the files is missing or not what it was."""
    for name, wanted in files.items():
        try:
            got = digest_file(path / name)
        except OSError as error:
            raise CheckpointError(_PLACE, str(path), f"{name} is missing ({error.strerror})", _ANOTHER) from None
        except ValueError as error:
            raise CheckpointError(_PLACE, str(path), str(error), _ANOTHER) from None
        if got.size_bytes != wanted.size_bytes:
            reason = f"{name} is truncated ({got.size_bytes} of {wanted.size_bytes} bytes)"
            raise CheckpointError(_PLACE, str(path), reason, _ANOTHER)
        if got.sha256 != wanted.sha256:
            raise CheckpointError(_PLACE, str(path), f"{name} is corrupt (its SHA-256 differs)", _ANOTHER)


def is_whole(path: Path) -> bool:
    """Whether every file that a checkpoint's manifest lists is there and has its SHA-256."""
    try:
        files = manifest_files((path / MANIFEST).read_bytes(), path)
        return bool(files) and all(digest_file(path / name) == wanted for name, wanted in files.items())
    except (OSError, ValueError):
        return False


def checkpoints_in(directory: Path) -> list[Path]:
    """Checkpoints below a directory that were written to the end, oldest first."""
    found = [path.parent for path in directory.glob(f"*/{MANIFEST}") if not path.parent.name.startswith(".")]
    return sorted(found, key=lambda path: path.name)


def checkpoint_kind(path: Path) -> Kind | None:
    """What a checkpoint is of, without verifying it; None when there is none that can be read."""
    try:
        return _manifest_kind((path / MANIFEST).read_bytes())
    except _UNREADABLE:
        return None


def read_state(path: Path) -> dict[str, Any] | None:
    """What a checkpoint's state.json says, without verifying it; None when there is none that can be read."""
    state, manifest = read_json(path / STATE), read_json(path / MANIFEST)
    kind = checkpoint_kind(path)
    if state is None or manifest is None or kind is None:
        return None
    return _in_sections(state, manifest.get("schema", 1), kind)


def digest_file(path: Path) -> FileDigest:
    """The digest of a file. `OSError` when it cannot be read, `ValueError` when it is no regular file."""
    # Somebody else's directory may hold a pipe, and opening one waits for a writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError(f"{path} is not a file")
        return FileDigest(hashlib.file_digest(file, "sha256").hexdigest(), facts.st_size)


def digest_files(directory: Path) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file below a directory, as a manifest lists them."""
    digests = {
        path.relative_to(directory).as_posix(): digest_file(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    return {name: {"bytes": one.size_bytes, "sha256": one.sha256} for name, one in digests.items()}


def manifest_files(raw: bytes, path: Path) -> dict[str, FileDigest]:
    """The files that the manifest of a checkpoint lists; `ValueError` for no list, or a name that leaves `path`."""
    files = read_digests(raw)
    manifest = json.loads(raw)
    return files | _policy_files(manifest, path) if manifest.get("schema") == 1 else files


def read_digests(raw: bytes) -> dict[str, FileDigest]:
    """The part `files` of a document that `digest_files` made; `ValueError` when it cannot be used."""
    try:
        listed = json.loads(raw)["files"].items()
        files = {str(name): FileDigest(str(one["sha256"]), int(one["bytes"])) for name, one in listed}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the manifest lists no files ({error})") from None
    for name in files:
        parts = name.split("/")
        if name.startswith("/") or "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"the manifest names {name!r}, which is not a file of the checkpoint")
    return files


def _manifest_kind(raw: bytes) -> Kind:
    # Schema 1 called screens "ui" and had no word for vector environments.
    kinds: dict[str, Kind] = {"vector": "vector", "screens": "screens", "ui": "screens"}
    return kinds[json.loads(raw).get("kind", "vector")]


def _check_sections(state: Any) -> None:
    """`ValueError` for a state without its sections and counters; right digests alone do not prove them."""
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}")
    for section in ("learner", "source", "progress", "about"):
        if not isinstance(state.get(section), dict):
            raise ValueError(f"it has no section {section}")
    for counter in ("updates", "steps"):
        if type(state["progress"].get(counter)) is not int:
            raise ValueError(f"progress.{counter} is {state['progress'].get(counter)!r}, which is no count")


def _required_files(schema: int, kind: Kind) -> list[str]:
    policy = [POLICY[kind]] if kind == "vector" else []
    if schema == 1:
        return [*policy, LEARNER, STATE] if kind == "vector" else [LEARNER, WAITING, STATE]
    return [*policy, LEARNER, SOURCE, STATE]


# ---------------------------------------------------------------------- schema 1

WAITING = "waiting.safetensors"
"""Where schema 1 had the episodes that wait."""


def _policy_files(manifest: dict[str, Any], path: Path) -> dict[str, FileDigest]:
    """The files of a policy's directory, of which schema 1 listed only the SHA-256 of the policy's own manifest."""
    if "policy" not in manifest:
        return {}
    name = f"{POLICY['screens']}/palaestra.json"
    try:
        raw = (path / name).read_bytes()
        listed = {f"{POLICY['screens']}/{inner}": digest for inner, digest in read_digests(raw).items()}
    except (OSError, ValueError):
        raw, listed = b"", {}
    return {name: FileDigest(str(manifest["policy"]), len(raw)), **listed}


def _in_sections(state: dict[str, Any], schema: int, kind: Kind) -> dict[str, Any]:
    """The state in the sections of the newest schema."""
    if schema != 1:
        return state

    def pick(**names: str) -> dict[str, Any]:
        return {new: state[old] for new, old in names.items() if old in state}

    about = dict(state.get("about") or {})
    if kind == "screens":
        progress = pick(updates="rounds", steps="episodes", episodes="episodes")
        source = pick(orders="orders", ready="ready")
        return {"learner": state.get("trainer", {}), "source": source, "progress": progress, "about": about}
    learner = ("n_updates", "adam_steps", "shuffle")
    recent = ("episode_rewards", "episode_lengths", "episode_successes", "planned_timesteps")
    progress = pick(updates="n_updates", steps="total_timesteps", episodes="num_episodes", **{k: k for k in recent})
    return {
        "learner": pick(**{name: name for name in learner}),
        "source": state.get("collector", {}),
        "progress": progress,
        "about": about,
    }
