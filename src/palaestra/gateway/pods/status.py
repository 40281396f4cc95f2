"""Reads a pod's document: whether the pod is ready, and why it failed.

The first container is the session; the others are sidecars, and only the end of the first ends the session.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

NAME, MANAGED_BY = "app.kubernetes.io/name", "app.kubernetes.io/managed-by"
GATEWAY, INSTANCE = "palaestra.dev/gateway", "palaestra.dev/instance"
SESSION, TYPE = "palaestra.dev/session", "palaestra.dev/session-type"

IMAGE_ERRORS = {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError"}
START_ERRORS = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff"}
ENDINGS = {"Evicted": "evicted", "DeadlineExceeded": "deadline_exceeded", "Preempting": "evicted"}


@dataclass(frozen=True)
class Failure:
    """Why a pod failed: a code for programs and a sentence for people."""

    reason: str
    text: str


@dataclass(frozen=True)
class Pod:
    """The state of a pod."""

    name: str
    uid: str
    version: str
    instance: str
    session_id: str | None
    """None for a pod of the warm pool."""
    session_type: str
    ip: str
    ready: bool
    failure: Failure | None
    unschedulable: str | None
    """The scheduler's message while it finds no node."""
    waiting_for: str
    """The conditions that are missing until it is ready."""
    deleting: bool
    """Its deletion was requested."""


def read_pod(document: Mapping[str, Any]) -> Pod:
    """The state of a pod from its document in the API."""
    metadata, spec, status = document["metadata"], document.get("spec", {}), document.get("status", {})
    labels = metadata.get("labels") or {}
    conditions = {one["type"]: one for one in status.get("conditions") or []}
    deleting = "deletionTimestamp" in metadata
    failure = _failure(spec, status, conditions) or (_deletion(conditions) if deleting else None)
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        version=metadata.get("resourceVersion", ""),
        instance=labels.get(INSTANCE, ""),
        session_id=labels.get(SESSION),
        session_type=labels.get(TYPE, ""),
        ip=status.get("podIP") or "",
        failure=failure,
        deleting=deleting,
        ready=failure is None and bool(status.get("podIP")) and _is_true(conditions, "Ready"),
        unschedulable=_unschedulable(conditions),
        waiting_for=_waiting_for(status, conditions),
    )


def _is_true(conditions: Mapping[str, Any], kind: str) -> bool:
    return bool(conditions.get(kind, {}).get("status") == "True")


def _failure(spec: Mapping[str, Any], status: Mapping[str, Any], conditions: Mapping[str, Any]) -> Failure | None:
    for name, state in _states(status):
        waiting = state.get("waiting") or {}
        if waiting.get("reason") in IMAGE_ERRORS:
            return Failure("image_pull_failed", f"image {_image(spec, name)!r}: {_format_reason(waiting)}")
        if waiting.get("reason") in START_ERRORS:
            return Failure("start_failed", f"container {name}: {_format_reason(waiting)}")
    ending = ENDINGS.get(status.get("reason", ""))
    if ending is not None:
        return Failure(ending, f"its pod: {_format_reason(status)}")
    session = next((one.get("name") for one in spec.get("containers") or []), None)
    over = status.get("phase") in ("Failed", "Succeeded")
    for name, state in _states(status):
        terminated = state.get("terminated")
        if terminated and (name == session or (over and terminated.get("exitCode") != 0)):
            return Failure("crashed", _format_exit(name, terminated))
    if over:
        return Failure("crashed", f"its pod ended as {status['phase']}: {_format_reason(status)}")
    return None


def _deletion(conditions: Mapping[str, Any]) -> Failure:
    target = conditions.get("DisruptionTarget")
    if target is not None and target.get("status") == "True":
        return Failure("evicted", f"its pod: {_format_reason(target)}")
    return Failure("deleted", "its pod was deleted by another client")


def _states(status: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for key in ("initContainerStatuses", "containerStatuses"):
        for one in status.get(key) or []:
            state = one.get("state") or {}
            if key == "containerStatuses" or (state.get("terminated") or {}).get("exitCode") != 0:
                yield one["name"], state


def _image(spec: Mapping[str, Any], name: str) -> str:
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    return next((str(one.get("image")) for one in containers if one.get("name") == name), "")


def _format_exit(name: str, terminated: Mapping[str, Any]) -> str:
    code, reason = terminated.get("exitCode"), terminated.get("reason") or ""
    message = " ".join(str(terminated.get("message") or "").split())
    ending = f"ended with exit code {code}"
    if reason not in ("", "Error", "Completed"):
        ending = f"was {reason} (exit code {code})"
    return f"container {name} {ending}" + (f": {message[-500:]}" if message else "")


def _format_reason(part: Mapping[str, Any]) -> str:
    """A reason with its message, on one line."""
    message = " ".join(str(part.get("message") or "").split())
    return ": ".join(piece for piece in (str(part.get("reason") or ""), message[:500]) if piece) or "no reason given"


def _unschedulable(conditions: Mapping[str, Any]) -> str | None:
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return " ".join(str(scheduled.get("message") or "no node fits").split())
    return None


def _waiting_for(status: Mapping[str, Any], conditions: Mapping[str, Any]) -> str:
    pieces = [f"phase {status.get('phase', 'unknown')}"]
    pieces += [
        f"{kind} is {condition.get('status')} ({_format_reason(condition)})"
        for kind, condition in conditions.items()
        if condition.get("status") != "True" and condition.get("reason")
    ]
    pieces += [
        f"container {name} waits ({_format_reason(state['waiting'])})"
        for name, state in _states(status)
        if state.get("waiting")
    ]
    return ", ".join(pieces)
