"""All errors that Palaestra raises deliberately.

    PalaestraError
    ├── ConfigError                input refused before anything is started or written; exit code 2
    │   ├── UnknownEnvironment       no environment has this id; the message has the closest names
    │   ├── CheckpointError          a checkpoint is damaged, incomplete or does not match
    │   ├── DatasetError             a dataset is missing, damaged, of another version or does not match
    │   ├── StateDirectoryLocked     another run service uses the state directory
    │   ├── UnknownRun               no run has this id, or several start with it
    │   ├── LaunchRefused            a preflight check failed; nothing was started
    │   └── HostUnreachable          another machine does not answer, or refuses us; runs there continue
    ├── ConsentRequired            a command would run code that the user has not approved
    ├── IllegalTransition          an action that is impossible in the current phase of a run
    ├── DownloadFailed             a dataset cannot be downloaded: no network, or the remote broke the connection
    ├── ServiceUnreachable         the run service does not answer and could not be started
    ├── SessionRefused             a session server or gateway refused a request (unknown task, wrong step, no capacity)
    │   └── InvalidAction            an action that cannot be performed on this screen; nothing was done
    ├── UnsupportedAction          the action format of a model family cannot express an action exactly
    ├── SessionFailed              a session failed (page crashed or hung, browser or pod gone); never a reward
    ├── EnvironmentContractError   an environment broke its contract (NaN, wrong shape, dead worker)
    ├── CollectorFailed            the asynchronous collector raised, hung, was killed or did not start
    │   └── RankFailed               one of the processes that torchrun started failed, so all of them end
    ├── NonFiniteError             a loss, gradient or parameter became NaN or infinite
    └── ExperienceError            rollouts that cannot be combined, buffers used out of order

A message has the place, the value, the reason and the remedy, in this order. A failing telemetry sink is not an error:
it causes one warning, and training continues.
"""

from __future__ import annotations

from typing import Self

from palaestra.redaction import redact_secrets


class PalaestraError(Exception):
    """Base class of all errors; the text can be shown to users."""


class _PlacedError(PalaestraError):
    """An error with place, value, reason and remedy. Secrets in the value are hidden."""

    def __init__(self, place: str, value: object, reason: str, remedy: str = "") -> None:
        value = redact_secrets(value, place)
        self.place, self.value, self.reason, self.remedy = place, value, reason, remedy
        shown = repr(value)
        if len(shown) > 200:
            shown = shown[:197] + "..."
        text = f"{place} = {shown}: {reason}."
        if remedy:
            # No full stop after a quoted command, so that it can be copied to the end of the line.
            text = f"{text} {remedy}" if remedy.endswith(("?", "]'")) else f"{text} {remedy.rstrip('.')}."
        super().__init__(text)

    def __reduce__(self) -> tuple[type[Self], tuple[str, object, str, str]]:
        # Pickle recreates an exception from its arguments, which are not the text here.
        return type(self), (self.place, self.value, self.reason, self.remedy)


class ConfigError(_PlacedError):
    """Input refused: place, value, reason, remedy. Nothing was started or written."""


class UnknownEnvironment(ConfigError):
    """No environment has this id or address here."""


class CheckpointError(ConfigError):
    """A checkpoint that is damaged or does not match; nothing was changed."""


class DatasetError(ConfigError):
    """A dataset that is missing, damaged, of another version or does not match; nothing was changed."""


class SessionRefused(PalaestraError):
    """A refused request; nothing changed. `code` is a machine-readable word, `status` the HTTP status."""

    def __init__(self, code: str, text: str, *, status: int = 400, retry_after: float | None = None) -> None:
        self.code, self.status, self.retry_after = code, status, retry_after
        super().__init__(text)


class InvalidAction(SessionRefused):
    """An action that cannot be performed: place, value, reason, remedy."""

    def __init__(self, place: str, value: object, reason: str, remedy: str = "") -> None:
        self.place, self.value, self.reason, self.remedy = place, value, reason, remedy
        super().__init__("invalid_action", str(ConfigError(place, value, reason, remedy)), status=422)


class UnsupportedAction(_PlacedError):
    """An action that the format of a model family cannot express exactly: place, value, reason, remedy."""


class SessionFailed(PalaestraError):
    """A session failed, independent of the agent. `reason` is a machine-readable word."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")


class EnvironmentContractError(PalaestraError):
    """An environment broke its contract while it was running."""


class CollectorFailed(PalaestraError):
    """The asynchronous collector ended unexpectedly; the learned weights are not affected."""


class RankFailed(CollectorFailed):
    """One of the processes of a run failed or ended; raised in all of them.

    `known_to_all`: all processes have the same message, so that one of them shows it.
    """

    def __init__(self, text: str, *, known_to_all: bool = False) -> None:
        self.known_to_all = known_to_all
        super().__init__(text)


class NonFiniteError(PalaestraError):
    """NaN or infinity; the message says whether it came from the environment, the network or the optimiser."""


class ExperienceError(PalaestraError):
    """Experience that cannot be combined, or a buffer used out of order."""


class StateDirectoryLocked(ConfigError):
    """Another run service uses the state directory; the message names it."""


class UnknownRun(ConfigError):
    """No run has this id, or several start with it."""


class LaunchRefused(ConfigError):
    """A preflight check failed: place, value, reason and remedy of the first failure. Nothing was started."""


class HostUnreachable(ConfigError):
    """Another machine does not answer, or refuses us. `permanent` if trying again changes nothing."""

    def __init__(self, place: str, value: object, reason: str, remedy: str = "", *, permanent: bool = False) -> None:
        super().__init__(place, value, reason, remedy)
        self.permanent = permanent


class ConsentRequired(PalaestraError):
    """The command would run code that the user has not approved; `digest` identifies the command to approve."""

    def __init__(self, text: str, digest: str) -> None:
        self.digest = digest
        super().__init__(text)


class IllegalTransition(PalaestraError):
    """An action that is impossible in the current phase of a run."""


class ServiceUnreachable(PalaestraError):
    """The run service does not answer and could not be started; the message has the path of its log."""


class DownloadFailed(PalaestraError):
    """A dataset cannot be downloaded now; what has arrived is kept for the next attempt."""
