"""`palaestra episodes`: list, show, export and delete recorded episodes of plays, without a service."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from palaestra.cli.app import localize_commands
from palaestra.cli.terminal import (
    JsonOption,
    YesOption,
    dump_json,
    format_bytes,
    format_columns,
    format_duration,
    format_time,
    print_json,
    sanitize_line,
    shorten,
)
from palaestra.errors import ConfigError
from palaestra.files.home import Home
from palaestra.intervals import format_return

if TYPE_CHECKING:
    from palaestra.runs.play.episode import EpisodeReader, RecordedStep
    from palaestra.runs.play.state import EpisodeRecord

_MAX_LISTED = 30
_MAX_NAME = 40
_MAX_NOTE = 60
_TITLES = ("EPISODE", "ENV", "MODE", "POLICY", "OUTCOME", "STEPS", "RETURN", "STARTED", "SIZE", "NOTE")
_STEP_TITLES = ("STEP", "ACTOR", "ACTION", "REWARD", "RETURN", "POLICY", "END")
_ALIGN_RIGHT = frozenset({"STEP", "STEPS", "REWARD", "RETURN", "SIZE"})

EpisodeArgument = Annotated[
    str, typer.Argument(metavar="EPISODE", help="Episode id or a unique prefix of it.", show_default=False)
]


def list_command(
    env: Annotated[str | None, typer.Option(metavar="ENV", help="Only this environment or screen task.")] = None,
    play: Annotated[str | None, typer.Option(metavar="PLAY", help="Only episodes of this play.")] = None,
    everything: Annotated[bool, typer.Option("--all", help=f"Show all, not only the newest {_MAX_LISTED}.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List recorded episodes, newest first."""
    from palaestra.runs.play.episode import list_episodes

    records = list_episodes(Home.default(), env_id=env, play_id=play)
    if as_json:
        print_json(records)
        return
    if not records:
        hint = localize_commands("No episodes yet. Play some with: palaestra studio")
        print("No matching episode." if env or play else hint)
        return
    shown = records if everything else records[:_MAX_LISTED]
    print("\n".join(_format_table(_TITLES, [_format_record(record) for record in shown])))
    if len(records) > len(shown):
        print(f"Showing the newest {_MAX_LISTED}; use --all for all.", file=sys.stderr)


def show_command(
    episode: EpisodeArgument,
    steps: Annotated[int, typer.Option(metavar="N", min=0, help="Show the last N steps (0: none).")] = 10,
    as_json: JsonOption = False,
) -> None:
    """Show the facts and the last steps of an episode."""
    from palaestra.runs.play.episode import open_episode

    reader = open_episode(Home.default(), episode)
    all_steps = reader.steps()
    shown = all_steps[max(0, len(all_steps) - steps) :]
    if as_json:
        document = {"episode": reader.record, "directory": str(reader.directory)}
        print_json(document | {"steps": [step.report for step in shown]})
        return
    print("\n".join(format_columns([(title, text) for title, text in _get_fields(reader) if text])))
    if shown:
        print("\n" + "\n".join(_format_table(_STEP_TITLES, [_format_step(step) for step in shown])))
    if 0 < len(shown) < len(all_steps):
        # Step 0 is the beginning, before the first action.
        print(f"Showing the last {len(shown)}; use --steps {len(all_steps)} for all.", file=sys.stderr)


def export_command(
    episode: EpisodeArgument,
    video: Annotated[Path | None, typer.Option(metavar="FILE", help="Video to write, .webm or .mp4.")] = None,
    demonstration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="NumPy file (.npz) of observations, actions and rewards.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write an episode as a video or as arrays to learn from."""
    from palaestra.runs.play.episode import export_demonstration, export_video, open_episode
    from palaestra.runs.video.encoder import check_video_file

    if video is None and demonstration is None:
        raise ConfigError("episodes export", episode, "nothing to write is given", "Add --video or --demonstration")
    reader = open_episode(Home.default(), episode)
    if video is not None:
        check_video_file(video, 1, long=True)
    written: dict[str, Any] = {"episode_id": reader.record.episode_id}
    lines = []
    # The arrays first: they are checked completely, and fail before a long video is encoded.
    if demonstration is not None:
        _check_demonstration_file(demonstration)
        arrays = export_demonstration(reader, demonstration)
        written["demonstration"] = str(demonstration)
        by_human = int(arrays.by_human.sum())
        lines.append(f"{demonstration}: {len(arrays.rewards):,} steps, {by_human:,} by a person")
    if video is not None:
        export_video(reader, video)
        written["video"] = str(video)
        lines.append(f"{video}: {format_bytes(video.stat().st_size)}")
    if as_json:
        print_json(written)
    else:
        print("\n".join(map(sanitize_line, lines)))


def delete_command(
    episodes: Annotated[
        list[str],
        typer.Argument(metavar="EPISODE", help="Episode id or a unique prefix of it.", show_default=False),
    ],
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete recorded episodes; they cannot be restored."""
    from palaestra.cli.runs.manage import confirm
    from palaestra.runs.play.episode import delete_episode, find_episode

    home = Home.default()
    ids = list(dict.fromkeys(find_episode(home, name).name for name in episodes))
    confirm(f"delete {', '.join(ids)}", yes)
    records = [delete_episode(home, episode_id) for episode_id in ids]
    if as_json:
        print_json(records)
    else:
        print("\n".join(f"{record.episode_id} deleted" for record in records))


def _check_demonstration_file(path: Path) -> None:
    if path.suffix != ".npz":
        raise ConfigError("--demonstration", str(path), "is not a .npz file", "Name it episode.npz")
    if not path.absolute().parent.is_dir():
        reason = "its directory does not exist"
        raise ConfigError("--demonstration", str(path), reason, "Create it, or choose another directory")


def _format_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return format_columns([titles, *rows], align_right=[title in _ALIGN_RIGHT for title in titles])


def _format_record(record: EpisodeRecord) -> tuple[str, ...]:
    if record.problem:
        note = sanitize_line(f"! {record.problem}")
        return (record.episode_id, *[""] * (len(_TITLES) - 2), note[:_MAX_NOTE])
    return (
        record.episode_id,
        shorten(record.env_id, _MAX_NAME),
        record.mode,
        shorten(record.policy, _MAX_NAME),
        record.outcome,
        f"{record.steps:,}",
        format_return(record.episode_return),
        format_time(record.started),
        format_bytes(record.bytes) if record.bytes else "",
        "" if record.success is None else "success" if record.success else "no success",
    )


def _get_fields(reader: EpisodeReader) -> list[tuple[str, str]]:
    record = reader.record
    by_human, by_agent = f"{record.human_steps:,} by a person", f"{record.agent_steps:,} by the policy"
    return [
        ("episode", record.episode_id),
        ("play", record.play_id),
        ("env", shorten(record.env_id, _MAX_NAME)),
        ("parameters", shorten(dump_json(record.parameters), 3 * _MAX_NAME) if record.parameters else ""),
        ("instruction", record.instruction),
        ("seed", "" if record.seed is None else str(record.seed)),
        ("mode", record.mode),
        ("policy", record.policy),
        ("checkpoint", record.checkpoint),
        ("outcome", record.outcome),
        ("success", "" if record.success is None else "yes" if record.success else "no"),
        ("steps", f"{record.steps:,} ({by_human}, {by_agent})"),
        ("return", f"{record.episode_return:,.2f}"),
        ("started", format_time(record.started)),
        ("elapsed", "" if record.ended is None else format_duration(max(0.0, record.ended - record.started))),
        ("size", format_bytes(record.bytes) if record.bytes else ""),
        ("directory", str(reader.directory)),
    ]


def _format_step(step: RecordedStep) -> tuple[str, ...]:
    report = step.report
    is_first = report.actor is None
    end = "terminated" if report.terminated else "truncated" if report.truncated else ""
    return (
        str(report.step),
        report.actor or "",
        "" if is_first else shorten(dump_json(report.action), _MAX_NAME),
        "" if is_first else f"{report.reward:.6g}",
        "" if is_first else f"{report.episode_return:.6g}",
        _format_outputs(report.outputs),
        end,
    )


def _format_outputs(outputs: dict[str, Any]) -> str:
    """What the policy reported, without lists: `value 1.52, log_prob -0.69`."""
    parts = []
    for name, value in outputs.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            parts.append(f"{name} {value:.4g}")
        elif isinstance(value, str):
            parts.append(f"{name} {value}")
    return shorten(", ".join(parts), _MAX_NAME)
