"""What a run tells the world: versioned events, the journal that keeps them, and the sinks that show them.

The training tower emits through `Telemetry`; the operations tower reads the journal with `JournalReader`. The
two towers meet here and nowhere else, so nothing in this package imports torch. Further kinds of event are in
`telemetry.event`, the meaning of every metric in `telemetry.metric`, the rules for a sink of your own in
`telemetry.conformance`.
"""

from typing import TYPE_CHECKING

from palaestra.lazy import lazy_attributes

if TYPE_CHECKING:
    from palaestra.telemetry.event import CheckpointSaved, EpisodeSummary, Event, TrainingStep
    from palaestra.telemetry.journal import Journal, JournalReader
    from palaestra.telemetry.sink import MemorySink, Telemetry
    from palaestra.telemetry.sinks import TelemetryConfig, open_telemetry

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

# `palaestra runs list` reads numbers with `telemetry.json_number` and must not pay for the sinks.
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
        "TelemetryConfig": "sinks",
        "TrainingStep": "event",
        "open_telemetry": "sinks",
    },
)
