"""What the cluster's API can answer instead of doing what was asked, and what that means to us.

Pure tables: which answers are worth another try and when, and what a person is told about the others.
"""

from __future__ import annotations

from palaestra.errors import ConfigError, SessionFailed

__all__ = [
    "ApiRefused",
    "ApiTrouble",
    "ApiUnreachable",
    "as_config_error",
    "as_failure",
    "collided",
    "retry_in_s",
    "worth_retrying",
]

ROLE = "Grant it with the Role in deploy/"


class ApiTrouble(Exception):
    """A request to the cluster's API was not granted."""


class ApiUnreachable(ApiTrouble):
    """No answer: refused connection, broken connection, or none in time. It may have been done all the same."""


class ApiRefused(ApiTrouble):
    """An answer, and not the one that was hoped for."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float | None = None) -> None:
        self.status, self.reason, self.message, self.retry_after_s = status, reason, message, retry_after_s
        super().__init__(f"{status} {reason}: {message}")


def worth_retrying(trouble: ApiTrouble) -> bool:
    """Whether the same request may be granted a moment later."""
    return not isinstance(trouble, ApiRefused) or trouble.status == 429 or trouble.status >= 500


def collided(trouble: ApiTrouble) -> bool:
    """Whether somebody else wrote in between: to the object meant, or, for one to be made, to its quota."""
    return isinstance(trouble, ApiRefused) and trouble.status == 409 and trouble.reason == "Conflict"


def retry_in_s(trouble: ApiTrouble | None, failures: int) -> float:
    """How long to wait after so many failures in a row (1 is the first): 0.2 s up to 5 s, or as long as was asked."""
    wait = min(5.0, 0.1 * 2.0 ** min(failures, 10))
    return max(wait, trouble.retry_after_s or 0.0) if isinstance(trouble, ApiRefused) else wait


def as_failure(trouble: ApiTrouble, doing: str, namespace: str) -> SessionFailed:
    """What the gateway's client is told. `doing` is a verb and what it is done to, such as `create pods`."""
    if not isinstance(trouble, ApiRefused):
        return SessionFailed("api_unreachable", f"{doing} in namespace {namespace}: {trouble}")
    said = f"{doing} in namespace {namespace}: {trouble.message}"
    if trouble.status == 403 and "exceeded quota" in trouble.message:
        return SessionFailed("quota_exceeded", f"{said}. Close sessions, or raise the ResourceQuota.")
    if trouble.status == 403 and "is being terminated" in trouble.message:
        return SessionFailed("namespace_missing", said)
    if trouble.status == 403 and trouble.reason == "Forbidden" and _is_about_rights(trouble.message):
        return SessionFailed("forbidden", f"{said}. {ROLE}.")
    if trouble.status == 401:
        return SessionFailed("unauthorized", f"{said}. The credentials are not valid, or no longer.")
    if trouble.status == 404 and "namespaces" in trouble.message:
        return SessionFailed("namespace_missing", f"{said}. kubectl create namespace {namespace}")
    if trouble.status in (400, 403, 422):
        # Also what admission rules (LimitRange, pod security, webhooks) do not let pass.
        return SessionFailed("manifest_rejected", said)
    word = "api_overloaded" if trouble.status == 429 else "api_failed"
    return SessionFailed(word, f"{said} (status {trouble.status})")


def _is_about_rights(message: str) -> bool:
    return " cannot " in message and "User " in message


def as_config_error(trouble: ApiTrouble, doing: str, namespace: str, server: str) -> ConfigError:
    """What whoever starts a gateway is told."""
    failure = as_failure(trouble, doing, namespace)
    if failure.reason == "api_unreachable":
        remedy = "Check kubeconfig and context, and that the API server runs"
        return ConfigError("gateway.kubernetes", server, f"the API server cannot be reached ({trouble})", remedy)
    return ConfigError("gateway.kubernetes", server, f"{failure.reason}: {failure.detail.rstrip('.')}")
