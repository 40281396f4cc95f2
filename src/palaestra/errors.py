"""Every error Palaestra raises on purpose, and what happens to each kind.

    PalaestraError
    ├── ConfigError            refused before anything is launched or written; exit code 2
    │   ├── UnknownEnvironment   the id names nothing; the nearest names are in the message
    │   ├── CheckpointError      a checkpoint is corrupt, truncated, or of another shape
    │   ├── StateDirectoryLocked            another run service holds the state directory
    │   ├── UnknownRun           no run has this id, or several begin so
    │   └── LaunchRefused        a preflight said no; nothing was launched
    ├── ConsentRequired          a command runs code that nobody has agreed to
    ├── IllegalTransition      something was asked of a run that cannot happen in its phase
    ├── ServiceUnreachable     the run service does not answer and could not be started
    ├── SessionRefused         a session server or gateway said no: unknown task, step out of order, no room, no right
    │   └── InvalidAction        an action that cannot be performed on this screen; nothing was done
    ├── UnsupportedAction         a model family has no exact words for an action; nothing was written
    ├── SessionFailed      a session broke (page crashed or hung, browser or pod gone); never a reward
    ├── EnvironmentContractError       an environment broke its contract while running (NaN, wrong shape, worker died)
    ├── CollectorFailed        the background collector raised, hung, was killed or would not start; with the cause
    ├── NonFiniteError         a loss, gradient or parameter stopped being a number; names where it came from
    └── ExperienceError        rollouts that cannot be combined, buffers used out of order

A message names the place, the value, the reason and the remedy, in that order. A broken observer (a telemetry sink)
is never an error: it warns once and training goes on.
"""

from __future__ import annotations

from palaestra.redaction import redact_secrets

__all__ = [
    "CheckpointError",
    "CollectorFailed",
    "ConfigError",
    "ConsentRequired",
    "EnvironmentContractError",
    "ExperienceError",
    "IllegalTransition",
    "InvalidAction",
    "LaunchRefused",
    "NonFiniteError",
    "PalaestraError",
    "ServiceUnreachable",
    "SessionFailed",
    "SessionRefused",
    "StateDirectoryLocked",
    "UnknownEnvironment",
    "UnknownRun",
    "UnsupportedAction",
]


class PalaestraError(Exception):
    """Anything we raise on purpose; its text is fit to show to a person as it stands."""


class ConfigError(PalaestraError):
    """Input refused: place, value, reason, remedy. Nothing has been launched or written. Secrets in it are hidden."""

    def __init__(self, place: str, value: object, reason: str, remedy: str = "") -> None:
        value = redact_secrets(value, place)
        self.place, self.value, self.reason, self.remedy = place, value, reason, remedy
        shown = repr(value)
        if len(shown) > 200:
            shown = shown[:197] + "..."
        text = f"{place} = {shown}: {reason}."
        if remedy:
            text = f"{text} {remedy}" if remedy.endswith("?") else f"{text} {remedy.rstrip('.')}."
        super().__init__(text)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str]]:
        # An exception travels between processes by its arguments, which are not its text here.
        return type(self), (self.place, self.value, self.reason, self.remedy)


class UnknownEnvironment(ConfigError):
    """The environment id or address names nothing that can be made here."""


class CheckpointError(ConfigError):
    """A checkpoint that cannot be trusted or does not fit; nothing was changed."""


class SessionRefused(PalaestraError):
    """A request that was understood and refused; nothing changed. `code` is a word, `status` the HTTP status."""

    def __init__(self, code: str, text: str, *, status: int = 400, retry_after: float | None = None) -> None:
        self.code, self.status, self.retry_after = code, status, retry_after
        super().__init__(text)


class InvalidAction(SessionRefused):
    """An action that cannot be performed: place, value, reason, remedy."""

    def __init__(self, place: str, value: object, reason: str, remedy: str = "") -> None:
        self.place, self.value, self.reason, self.remedy = place, value, reason, remedy
        super().__init__("invalid_action", str(ConfigError(place, value, reason, remedy)), status=422)


class UnsupportedAction(PalaestraError):
    """An action that a model family's grammar cannot say exactly: place, value, reason, remedy."""

    def __init__(self, place: str, value: object, reason: str, remedy: str = "") -> None:
        self.place, self.value, self.reason, self.remedy = place, value, reason, remedy
        super().__init__(str(ConfigError(place, value, reason, remedy)))

    def __reduce__(self) -> tuple[type[UnsupportedAction], tuple[str, object, str, str]]:
        # An exception travels between processes by its arguments, which are not its text here.
        return type(self), (self.place, self.value, self.reason, self.remedy)


class SessionFailed(PalaestraError):
    """A session came to grief through no doing of the agent's. `reason` is a word a program can sort by."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")


class EnvironmentContractError(PalaestraError):
    """An environment broke its contract while running."""


class CollectorFailed(PalaestraError):
    """Collection in the background came to an end that nobody asked for; learned weights are untouched."""


class NonFiniteError(PalaestraError):
    """A number stopped being one; the message says whether it came from environment, network or optimiser."""


class ExperienceError(PalaestraError):
    """Experience that cannot be combined or was used out of order."""


class StateDirectoryLocked(ConfigError):
    """Another run service holds the state directory; the message says which."""


class UnknownRun(ConfigError):
    """No run has this id, or several begin so."""


class LaunchRefused(ConfigError):
    """A preflight said no: place, value, reason, remedy of the first refusal. Nothing was launched."""


class ConsentRequired(PalaestraError):
    """The command runs code that nobody has agreed to; `digest` names exactly the command to agree to."""

    def __init__(self, text: str, digest: str) -> None:
        self.digest = digest
        super().__init__(text)


class IllegalTransition(PalaestraError):
    """Something was asked of a run that cannot happen in its phase."""


class ServiceUnreachable(PalaestraError):
    """The run service does not answer and could not be started; the message says where its log is."""
