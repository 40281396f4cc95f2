"""What a pod's document says: whether it is ready, and if it never will be, why.

Pure reading of what the scheduler and the kubelet write. The first container is the session; the others keep it
company, and only its end is the session's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["GATEWAY", "INSTANCE", "MANAGED_BY", "NAME", "SESSION", "TYPE", "Failure", "Pod", "read_pod"]

NAME, MANAGED_BY = "app.kubernetes.io/name", "app.kubernetes.io/managed-by"
GATEWAY, INSTANCE = "palaestra.dev/gateway", "palaestra.dev/instance"
SESSION, TYPE = "palaestra.dev/session", "palaestra.dev/session-type"

IMAGE_TROUBLE = {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError"}
START_TROUBLE = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff"}
ENDINGS = {"Evicted": "evicted", "DeadlineExceeded": "deadline_exceeded", "Preempting": "evicted"}


@dataclass(frozen=True)
class Failure:
    """Why a pod will not be, or no longer is, a session: a word for programs and a sentence for people."""

    reason: str
    text: str


@dataclass(frozen=True)
class Pod:
    """One pod at one moment."""

    name: str
    uid: str
    version: str
    instance: str
    session_id: str | None
    """None for a spare."""
    session_type: str
    ip: str
    ready: bool
    failure: Failure | None
    unschedulable: str | None
    """What the scheduler says while it finds no node."""
    waiting_for: str
    """What is missing until it is ready, in the cluster's own words."""
    leaving: bool
    """Its deletion was asked for."""


def read_pod(document: Mapping[str, Any]) -> Pod:
    """The pod that a document of the API describes."""
    metadata, spec, status = document["metadata"], document.get("spec", {}), document.get("status", {})
    labels = metadata.get("labels") or {}
    conditions = {one["type"]: one for one in status.get("conditions") or []}
    leaving = "deletionTimestamp" in metadata
    failure = _failure(spec, status, conditions) or (_leaving(conditions) if leaving else None)
    return Pod(
        name=metadata["name"], uid=metadata["uid"], version=metadata.get("resourceVersion", ""),
        instance=labels.get(INSTANCE, ""), session_id=labels.get(SESSION), session_type=labels.get(TYPE, ""),
        ip=status.get("podIP") or "", failure=failure, leaving=leaving,
        ready=failure is None and bool(status.get("podIP")) and _holds(conditions, "Ready"),
        unschedulable=_unschedulable(conditions), waiting_for=_waiting_for(status, conditions),
    )  # fmt: skip


def _holds(conditions: Mapping[str, Any], kind: str) -> bool:
    return bool(conditions.get(kind, {}).get("status") == "True")


def _failure(spec: Mapping[str, Any], status: Mapping[str, Any], conditions: Mapping[str, Any]) -> Failure | None:
    for name, state in _states(status):
        waiting = state.get("waiting") or {}
        if waiting.get("reason") in IMAGE_TROUBLE:
            return Failure("image_pull_failed", f"image {_image(spec, name)!r}: {_words(waiting)}")
        if waiting.get("reason") in START_TROUBLE:
            return Failure("start_failed", f"container {name}: {_words(waiting)}")
    ending = ENDINGS.get(status.get("reason", ""))
    if ending is not None:
        return Failure(ending, f"its pod: {_words(status)}")
    session = next((one.get("name") for one in spec.get("containers") or []), None)
    over = status.get("phase") in ("Failed", "Succeeded")
    for name, state in _states(status):
        terminated = state.get("terminated")
        if terminated and (name == session or (over and terminated.get("exitCode") != 0)):
            return Failure("crashed", _end(name, terminated))
    if over:
        return Failure("crashed", f"its pod ended as {status['phase']}: {_words(status)}")
    return None


def _leaving(conditions: Mapping[str, Any]) -> Failure:
    target = conditions.get("DisruptionTarget")
    if target is not None and target.get("status") == "True":
        return Failure("evicted", f"its pod: {_words(target)}")
    return Failure("deleted", "its pod was deleted by somebody else")


def _states(status: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key in ("initContainerStatuses", "containerStatuses"):
        for one in status.get(key) or []:
            state = one.get("state") or {}
            if key == "containerStatuses" or (state.get("terminated") or {}).get("exitCode") != 0:
                yield one["name"], state


def _image(spec: Mapping[str, Any], name: str) -> str:
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    return next((str(one.get("image")) for one in containers if one.get("name") == name), "")


def _end(name: str, terminated: Mapping[str, Any]) -> str:
    code, reason = terminated.get("exitCode"), terminated.get("reason") or ""
    said = " ".join(str(terminated.get("message") or "").split())
    how = f"ended with exit code {code}"
    if reason not in ("", "Error", "Completed"):
        how = f"was {reason} (exit code {code})"
    return f"container {name} {how}" + (f": {said[-500:]}" if said else "")


def _words(part: Mapping[str, Any]) -> str:
    """A reason with its message, on one line."""
    said = " ".join(str(part.get("message") or "").split())
    return ": ".join(piece for piece in (str(part.get("reason") or ""), said[:500]) if piece) or "no reason given"


def _unschedulable(conditions: Mapping[str, Any]) -> str | None:
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return " ".join(str(scheduled.get("message") or "no node fits").split())
    return None


def _waiting_for(status: Mapping[str, Any], conditions: Mapping[str, Any]) -> str:
    pieces = [f"phase {status.get('phase', 'unknown')}"]
    pieces += [
        f"{kind} is {condition.get('status')} ({_words(condition)})"
        for kind, condition in conditions.items()
        if condition.get("status") != "True" and condition.get("reason")
    ]
    pieces += [
        f"container {name} waits ({_words(state['waiting'])})"
        for name, state in _states(status)
        if state.get("waiting")
    ]
    return ", ".join(pieces)
