"""Telemetry of a run: versioned events, the journal that stores them, and the sinks that show them.

Training emits events through `Telemetry`; the run service reads the journal with `JournalReader`. Nothing in this
package imports torch, because operations run without it. `telemetry.event` has all kinds of events,
docs/metrics.md the meaning of every metric, `telemetry.conformance` the rules for your own sink.
"""

from typing import TYPE_CHECKING

from palaestra.lazy import lazy_attributes

if TYPE_CHECKING:
    from palaestra.telemetry.config import TelemetryConfig, open_telemetry
    from palaestra.telemetry.event import CheckpointSaved, EpisodeSummary, Event, TrainingStep
    from palaestra.telemetry.journal import Journal, JournalReader
    from palaestra.telemetry.sink import MemorySink, Telemetry

__all__ = [
    "CheckpointSaved",
    "EpisodeSummary",
    "Event",
    "Journal",
    "JournalReader",
    "MemorySink",
    "Telemetry",
    "TelemetryConfig",
    "TrainingStep",
    "open_telemetry",
]

# Lazy, because `palaestra runs list` must not load the sinks.
__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "CheckpointSaved": "event",
        "EpisodeSummary": "event",
        "Event": "event",
        "Journal": "journal",
        "JournalReader": "journal",
        "MemorySink": "sink",
        "Telemetry": "sink",
        "TelemetryConfig": "config",
        "TrainingStep": "event",
        "open_telemetry": "config",
    },
)
