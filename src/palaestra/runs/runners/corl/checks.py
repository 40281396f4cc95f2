"""Checks before a CORL run: its time on a CPU, its evaluations, disk space and warm start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from palaestra.errors import ConfigError
from palaestra.files.home import Home
from palaestra.runs.checkpoints.catalogue import get_checkpoint
from palaestra.runs.checkpoints.pickle_scan import scan
from palaestra.runs.checkpoints.signature import find_dataset_mismatch, find_incompatibilities
from palaestra.runs.process.interpreter import Interpreter, Probe
from palaestra.runs.runner import Finding, Machine
from palaestra.runs.runners.corl.offline_data import OfflineData
from palaestra.runs.runners.corl.script import FIELD_RANGES, CorlScript
from palaestra.runs.spec import RunSpec

_UPDATE_MS = {
    "td3_bc": 8.0,
    "any_percent_bc": 1.5,
    "iql": 9.0,
    "cql": 190.0,
    "cal_ql": 125.0,
    "awac": 17.0,
    "spot": 21.0,
    "dt": 300.0,
    "edac": 160.0,
    "sac_n": 95.0,
    "lb_sac": 95.0,
}
"""Milliseconds of one update on one busy core of a small server, measured with the scripts; with batches of 256."""
_LONG_RUN_S = 3_600.0
_HIDDEN = 256
_BYTES_PER_PARAMETER = 12
"""A weight in 32 bits and the two moments of Adam."""


def range_findings(script: CorlScript, values: Mapping[str, object]) -> list[Finding]:
    """Refusals of values outside the ranges of their fields, and of a run without updates."""
    findings = []
    for name, value in values.items():
        field = script.argument(name)
        expected = _find_broken_range(FIELD_RANGES.get(name, {}), value)
        if expected and field is not None:
            remedy = "Give a number in this range" if field.computed else f"Its default is {field.default!r}"
            findings.append(Finding("flag", "refused", f"{name} = {value!r}: must be {expected}", remedy))
    if not findings and script.count_updates({**script.defaults(), **values}) == 0:
        text = f"{script.update_field} = 0: the run would have no updates"
        findings.append(Finding("flag", "refused", text, f"Set {script.update_field}=1 or more"))
    return findings


def _find_broken_range(limits: Mapping[str, float], value: object) -> str:
    """The range of a field if a number is outside; empty if it is inside."""
    if not isinstance(value, int | float):
        return ""
    least, most, above = (limits.get(key) for key in ("minimum", "maximum", "exclusiveMinimum"))
    is_low = (least is not None and value < least) or (above is not None and value <= above)
    if not is_low and (most is None or value <= most):
        return ""
    if most is None:
        return f"at least {least}"
    return f"above {above} and at most {most}" if least is None else f"between {least} and {most}"


def run_findings(
    script: CorlScript, values: Mapping[str, object], data: OfflineData, machine: Machine, *, on_gpu: bool
) -> Iterator[Finding]:
    """What the values mean for the time, the evaluations, the replay buffer and the disk."""
    yield from _check_buffer(values, data)
    updates = script.count_updates(values)
    if updates is None:
        return
    yield from _check_evaluations(script, values, updates)
    yield from _check_decision_transformer(values)
    if not on_gpu:
        yield from _check_time(script, values, updates)
    yield from _check_disk(script, values, data, machine)


def _check_buffer(values: Mapping[str, object], data: OfflineData) -> Iterator[Finding]:
    size, steps = values.get("buffer_size"), data.dataset.total_steps
    if isinstance(size, int) and size < steps:
        text = f"buffer_size = {size:,} is smaller than the dataset of {steps:,} steps, which the script refuses"
        yield Finding("flag", "refused", text, f"Set buffer_size={steps}")


def _check_evaluations(script: CorlScript, values: Mapping[str, object], updates: int) -> Iterator[Finding]:
    if script.evaluation_field and script.count_evaluations(values) == 0:
        interval = values.get(script.evaluation_field)
        text = f"{script.evaluation_field} = {interval:,} is more than {updates:,} updates: the run would not be "
        remedy = f"Set {script.evaluation_field}={updates} or less"
        yield Finding("evaluation", "warning", f"{text}evaluated, and no checkpoint would be saved", remedy)
    elif script.argument("checkpoints_path") is None:
        text = f"{script.path.name} saves no checkpoints"
        yield Finding("checkpoint", "warning", text, "Choose another script to keep what it learns")


def _check_decision_transformer(values: Mapping[str, object]) -> Iterator[Finding]:
    if values.get("target_returns") == [12000.0, 6000.0]:
        text = "target_returns are those of HalfCheetah: the transformer is asked for returns of 12,000 and 6,000"
        yield Finding("flag", "warning", text, "Set target_returns to returns of good episodes of the dataset")


def _check_time(script: CorlScript, values: Mapping[str, object], updates: int) -> Iterator[Finding]:
    batch = values.get("batch_size", _HIDDEN)
    scale = max(0.5, batch / _HIDDEN) if isinstance(batch, int) and script.path.stem != "dt" else 1.0
    seconds = updates * _UPDATE_MS.get(script.path.stem, 5.0) * scale / 1000.0
    if seconds > _LONG_RUN_S:
        text = f"{updates:,} updates on a CPU take about {seconds / 3600:.0f} h on one core, without evaluations"
        shorter = max(1, int(updates * 600.0 / seconds))
        if script.update_field == "num_epochs":
            per_epoch = values.get("num_updates_on_epoch")
            shorter = max(1, shorter // (per_epoch if isinstance(per_epoch, int) and per_epoch else 1))
        yield Finding("time", "warning", text, f"For ten minutes set {script.update_field}={shorter}, or use --gpus 1")


def _check_disk(
    script: CorlScript, values: Mapping[str, object], data: OfflineData, machine: Machine
) -> Iterator[Finding]:
    if values.get("checkpoints_path") is None:
        return
    count = 1 if script.path.stem == "dt" else script.count_evaluations(values)
    needed = count * _estimate_checkpoint_bytes(values, data)
    free = machine.free_disk_bytes
    text = f"{count:,} checkpoints take about {max(1, needed >> 20):,} MB"
    remedy = f"Set {script.evaluation_field} higher, or checkpoints_path=null to save none"
    if needed > free:
        yield Finding("disk", "refused", f"{text}, and {free >> 20:,} MB are free", remedy)
    elif needed > free // 2:
        yield Finding("disk", "warning", f"{text} of {free >> 20:,} MB that are free", remedy)


def _estimate_checkpoint_bytes(values: Mapping[str, object], data: OfflineData) -> int:
    """Networks of two or three hidden layers with their optimisers: a policy, its critics and a value function."""
    critics = values.get("num_critics", 2)
    networks = 2 + (critics if isinstance(critics, int) else 2)
    inputs = sum(sum(space.shape or ()) for space in (data.dataset.observation_space, data.dataset.action_space))
    return networks * (inputs * _HIDDEN + 2 * _HIDDEN * _HIDDEN) * _BYTES_PER_PARAMETER


def jax_findings(script: CorlScript, interpreter: Interpreter, probed: Probe) -> Iterator[Finding]:
    """Whether JAX still has a function that the scripts for it call."""
    if "jax" not in script.imports or not probed.at_least("jax", 0, 6):
        return
    if "jax.tree_map(" in script.path.read_text(encoding="utf-8"):
        text = f"{script.path.name} calls jax.tree_map, which jax {probed.packages['jax']} does not have"
        remedy = f"{interpreter.path} -m pip install 'jax==0.4.35' 'flax<0.10.3' 'optax<0.2.5' 'chex<0.1.90'"
        yield Finding("dependency:jax", "refused", text, remedy)


def warm_start_findings(script: CorlScript, name: str, spec: RunSpec, data: OfflineData) -> Iterator[Finding]:
    """Whether the script, called `name`, can begin with the weights of a checkpoint, and what that means."""
    if spec.warm_start is None:
        return
    path = spec.invoked_from / Path(spec.warm_start).expanduser()
    if script.argument("load_model") is None:
        text = f"{script.path.name} has no load_model: it cannot begin with the weights of a checkpoint"
        yield Finding("warm_start", "refused", text, "Leave --warm-start out, or use td3_bc, iql or any_percent_bc")
    elif not path.is_file():
        remedy = "Give a checkpoint_N.pt of an earlier run, or its id"
        yield Finding("warm_start", "refused", f"{spec.warm_start}: no such file", remedy)
    elif reason := scan(path).reason:
        text = f"{path.name} {reason}, and the script would unpickle it"
        remedy = "Use a file with weights only, which all scripts but cql and cal_ql save, or leave --warm-start out"
        yield Finding("warm_start", "refused", text, remedy)
    elif reason := _find_other_origin(path, name, data):
        yield Finding("warm_start", "refused", reason, f"Use a checkpoint of corl/{name} in {data.env_id}")
    else:
        text = (
            f"{script.path.name} loads the networks and optimisers of {path.name} and counts its updates from 0 again"
        )
        yield Finding("warm_start", "ok", text)


def _find_other_origin(path: Path, name: str, data: OfflineData) -> str:
    """Why the networks of a registered checkpoint do not fit; empty if they do, and for any other file."""
    try:
        record = get_checkpoint(Home.default(), str(path))
    except ConfigError:
        return ""
    mismatch = find_dataset_mismatch(record.offline_dataset, data.env_id, data.env_kwargs)
    for reason in (
        [mismatch] if mismatch else find_incompatibilities({"env_id": record.env_id}, {"env_id": data.env_id})
    ):
        return f"{path.name}: {reason}"
    agent_id = f"corl/{name}"
    return "" if record.agent_id == agent_id else f"{path.name} was saved by {record.agent_id}, this is {agent_id}"
