"""What the sources of one attempt share while they are translated: counters, thinning, and which source has values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from palaestra.runs.wire import JsonObject
from palaestra.telemetry.event import EpisodeSummary, TrainingStep

_MAX_REASON_LENGTH = 200
_MAX_THINNED_METRICS = 2_000
_MAX_ORIGINS = 4_000


@dataclass
class TranslationCounts:
    """Counters of everything but events."""

    unread_lines: int = 0
    episode_lines: int = 0
    corrupt: int = 0
    """Damaged places in event files."""
    dropped: int = 0
    """Lines marked as events that could not be parsed."""
    first_dropped: str = ""
    """Place and reason of the first dropped line or damaged place."""
    episodes: int = 0
    tracking_url: str = ""

    def add_dropped(self, place: str, reason: object) -> None:
        """Count a dropped line."""
        self.dropped += 1
        self._remember(place, reason)

    def add_corrupt(self, place: str, reason: object, count: int = 1) -> None:
        """Count damaged places in an event file."""
        if count:
            self.corrupt += count
            self._remember(place, reason)

    def _remember(self, place: str, reason: object) -> None:
        # Bounded, because it is stored with every batch and shown in an alarm.
        self.first_dropped = self.first_dropped or f"{place}: {str(reason)[:_MAX_REASON_LENGTH]}"


class Thinning:
    """Keeps the first value of each metric per `every` steps, for trainers that report every gradient step."""

    def __init__(self, every: int, stored: Mapping[str, int] | None = None) -> None:
        self._every = every
        self.last_kept = dict(stored or {})
        """The last interval with a kept value, by metric; pass it to another instance to continue."""

    def keeps(self, name: str, step: int) -> bool:
        """Whether this value is kept."""
        if self._every == 1:
            return True
        interval = step // self._every
        if self.last_kept.get(name) == interval:
            return False
        if name in self.last_kept or len(self.last_kept) < _MAX_THINNED_METRICS:
            self.last_kept[name] = interval
        return True


class TranslationState:
    """What the sources of an attempt share."""

    def __init__(self, thin_every: int, state: JsonObject, clock: Callable[[], float]) -> None:
        self.counts = TranslationCounts(**state.get("counts", {}))
        self.thinning = Thinning(thin_every, state.get("thinned"))
        self.clock = clock
        self.reported_by = ""
        """The source by which a program reports its metrics on purpose; then its printed text is not searched."""
        self.has_empty_event_files = False
        """All event files of a program are read, and hold no number."""
        self.origins: dict[str, str] = {}
        """Where the metrics of a program were found, by name."""

    def remember_origin(self, names: Iterable[str], source: str) -> None:
        """Remember in which kind of source metrics were found first."""
        for name in names:
            if name not in self.origins and len(self.origins) < _MAX_ORIGINS:
                self.origins[name] = f"{source}:{name}"

    def number_episode(self, episode: EpisodeSummary) -> EpisodeSummary:
        """The episode with the next number, unless it has one."""
        self.counts.episodes += 1
        return episode if episode.episode else replace(episode, episode=self.counts.episodes)

    def thin_step(self, step: TrainingStep) -> TrainingStep | None:
        """Remove the metrics that thinning drops; None when none is left."""
        metrics = {name: value for name, value in step.metrics.items() if self.thinning.keeps(name, step.env_step)}
        if len(metrics) == len(step.metrics):
            return step
        return replace(step, metrics=metrics) if metrics else None
