"""Optuna as sampler and pruner. Its journal is an index: the trials of a sweep are in `trials.jsonl`, and a study that
is missing, behind or damaged is brought up to date from them.

Two properties of Optuna's journal file do not survive `kill -9`. Its lock is a link that remains for 30 s; here it is a
lock of the kernel, which ends with the process. And an incomplete last line makes the file unreadable once another line
follows; it is removed when the file is opened.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palaestra.errors import ConfigError
from palaestra.files.home import Home
from palaestra.runs.sweeps.spec import SweepSpec, SweptParameter
from palaestra.runs.sweeps.trial_log import SweepLog, Trial
from palaestra.runs.wire import JsonObject

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.storages import JournalStorage

_log = logging.getLogger(__name__)
_NUMBER = "trial"
"""User attribute of an Optuna trial: its number in the sweep."""
_DEFAULT_RUNGS = 20


def needs_optuna(spec: SweepSpec) -> bool:
    """Whether a sweep cannot run without Optuna."""
    return spec.sampler == "optuna" or spec.pruning.method != "none"


def require_optuna() -> None:
    """Raise `ConfigError` if Optuna is not installed."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        remedy = "Install it where the service runs: pip install 'palaestra[sweeps]'"
        raise ConfigError("optuna", None, f"the package is required and cannot be imported ({error})", remedy) from None


class _KernelLock:
    """A lock of Optuna's journal that is released when the process dies."""

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor = path, -1

    def acquire(self) -> bool:
        """Wait for the lock."""
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)


def open_storage(home: Home) -> JournalStorage:
    """Optuna's storage of all sweeps. A damaged file is moved aside; the studies are rebuilt from the trials."""
    require_optuna()
    import optuna

    optuna.logging.disable_default_handler()
    optuna.logging.enable_propagation()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    for _ in range(2):
        _remove_incomplete_line(home.optuna)
        try:
            return _open_journal(home.optuna)
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            aside = home.optuna.with_name(f"optuna.corrupt-{time.strftime('%Y%m%d-%H%M%S')}.journal")
            _log.warning("%s is damaged (%s); it is now %s, and is rebuilt", home.optuna, error, aside.name)
            home.optuna.rename(aside)
    return _open_journal(home.optuna)


def _open_journal(path: Path) -> JournalStorage:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    lock: Any = _KernelLock(path.with_name(f".{path.name}.lock"))
    return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))


def _remove_incomplete_line(path: Path) -> None:
    try:
        with open(path, "r+b") as file:
            data = file.read()
            file.truncate(data.rfind(b"\n") + 1)
    except FileNotFoundError:
        return


class OptunaStudy:
    """The study of one sweep. Blocks on the disk; call it in a thread, and from one thread at a time."""

    def __init__(self, storage: JournalStorage, log: SweepLog, total_steps: int | None = None) -> None:
        import optuna

        self._spec, self._storage = log.spec, storage
        self._distributions = {key: _distribution(value) for key, value in log.spec.parameters.items()}
        self.report_every = log.spec.pruning.every or max(1, (total_steps or _DEFAULT_RUNGS) // _DEFAULT_RUNGS)
        """Steps between two reports of a trial."""
        self._study = optuna.create_study(
            storage=storage,
            study_name=log.sweep_id,
            direction=log.spec.direction,
            load_if_exists=True,
            pruner=_build_pruner(log.spec, self.report_every, total_steps),
        )
        self._ids: dict[int, int] = {}
        self._synchronize(log)

    def ask(self, number: int) -> JsonObject:
        """The parameters of the next trial."""
        from optuna.samplers import TPESampler

        # A sampler of its own for each trial: after a restart, one sampler would repeat its first random draws.
        seed = (self._spec.sampler_seed * 1_000_003 + number) % 2**32
        self._study.sampler = TPESampler(seed=seed, constant_liar=True)
        trial = self._study.ask(self._distributions)
        trial.set_user_attr(_NUMBER, number)
        self._ids[number] = trial._trial_id
        return {key: _from_optuna(self._spec.parameters[key], value) for key, value in trial.params.items()}

    def add(self, trial: Trial) -> None:
        """Add a trial that another sampler has chosen, so that it can be compared with the others."""
        if trial.number not in self._ids:
            self._create(trial)

    def report(self, trial: Trial, step: int, value: float) -> bool:
        """Report the value of a trial at a step; returns whether the trial is to be stopped."""
        trial_id = self._ids[trial.number]
        self._storage.set_trial_intermediate_value(trial_id, self._report_step(step), value)
        if self._spec.pruning.method == "none":
            return False
        return bool(self._study.pruner.prune(self._study, self._storage.get_trial(trial_id)))

    def finish(self, trial: Trial) -> None:
        """Report the outcome of a trial."""
        from optuna.trial import TrialState

        trial_id, (state, values) = self._ids.get(trial.number), _outcome(trial)
        known = None if trial_id is None else self._storage.get_trial(trial_id).state
        if trial_id is not None and known is TrialState.RUNNING:
            self._storage.set_trial_state_values(trial_id, state, values)
        elif state is TrialState.COMPLETE and known is not state:
            # It was reported as failed, and was continued since.
            self._create(trial)

    def _synchronize(self, log: SweepLog) -> None:
        """Add trials that the study lacks, report outcomes it does not know, and end those that never began."""
        from optuna.trial import TrialState

        for frozen in self._study.get_trials(deepcopy=False):
            number = frozen.user_attrs.get(_NUMBER)
            if number in log.trials:
                self._ids[number] = frozen._trial_id
            elif not frozen.state.is_finished():
                # The service was killed before it wrote the trial down.
                self._storage.set_trial_state_values(frozen._trial_id, TrialState.FAIL)
        for trial in log.trials.values():
            if trial.number not in self._ids:
                self._create(trial)
            elif trial.has_ended:
                self.finish(trial)

    def _create(self, trial: Trial) -> None:
        import optuna

        state, values = _outcome(trial)
        template = optuna.trial.create_trial(
            state=state,
            value=values[0] if values else None,
            params={key: _to_optuna(value) for key, value in trial.parameters.items()},
            distributions=self._distributions,
            user_attrs={_NUMBER: trial.number},
            intermediate_values={self._report_step(step): value for step, value in trial.reports.items()},
        )
        study_id = self._storage.get_study_id_from_name(self._study.study_name)
        self._ids[trial.number] = self._storage.create_new_trial(study_id, template_trial=template)

    def _report_step(self, step: int) -> int:
        # Hyperband counts rungs; the median compares equal steps, whatever they are called.
        return step // self.report_every if self._spec.pruning.method == "hyperband" else step


def _outcome(trial: Trial) -> tuple[Any, list[float] | None]:
    from optuna.trial import TrialState

    if not trial.has_ended:
        return TrialState.RUNNING, None
    if trial.state == "pruned":
        return TrialState.PRUNED, None
    if trial.state == "succeeded" and trial.value is not None and math.isfinite(trial.value):
        return TrialState.COMPLETE, [trial.value]
    return TrialState.FAIL, None


def _build_pruner(spec: SweepSpec, every: int, total_steps: int | None) -> BasePruner:
    from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner

    pruning = spec.pruning
    if pruning.method == "median":
        return MedianPruner(n_startup_trials=pruning.startup_trials, n_warmup_steps=pruning.first)
    if pruning.method == "hyperband":
        rungs = max(1, (total_steps or every * _DEFAULT_RUNGS) // every)
        return HyperbandPruner(min_resource=1, max_resource=rungs, reduction_factor=pruning.reduction_factor)
    return NopPruner()


def _distribution(parameter: SweptParameter) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    low, high, step = parameter.low, parameter.high, parameter.step
    if parameter.values or low is None or high is None:
        return CategoricalDistribution([_to_optuna(value) for value in parameter.values])
    if parameter.is_integer:
        return IntDistribution(int(low), int(high), log=parameter.log, step=int(step or 1))
    return FloatDistribution(low, high, log=parameter.log, step=step)


def _to_optuna(value: Any) -> Any:
    """Optuna's choices are scalars; a list or mapping is its JSON text."""
    return json.dumps(value) if isinstance(value, list | tuple | dict) else value


def _from_optuna(parameter: SweptParameter, value: Any) -> Any:
    if not parameter.values:
        return value
    return next(
        choice for choice in parameter.values if _to_optuna(choice) == value and type(_to_optuna(choice)) is type(value)
    )
