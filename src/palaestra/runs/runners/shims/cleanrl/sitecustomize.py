"""Lets scripts written for Gymnasium 0.29 report their episodes under Gymnasium 1: put on PYTHONPATH, script untouched.

Since version 1 a vector environment resets in the next step and tells of an ended episode in another shape; scripts
that look for `infos["final_info"]` then train for hours and never see an episode end. These things are put back, and
only where the script did not choose otherwise itself: `SyncVectorEnv` resets in the same step and says `final_info` and
`final_observation` as 0.29 did; an episode's return and length are arrays of one number; `TransformObservation` may be
called without a space; `GrayScaleObservation` and `FrameStack` have their names; the environments of an installed
`ale_py` are registered. `RecordVideo` can be closed where W&B replaced `close` with one for 0.29's recorder, which
otherwise fails after the training. Patches happen when those modules are imported, so other programs pay nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from copy import deepcopy
from types import ModuleType
from typing import Any


def _same_step(module: ModuleType) -> None:
    """`SyncVectorEnv` as it was: an ended episode's last word, and the next one's first observation, in one step."""
    import numpy as np
    from gymnasium.vector.utils import concatenate, iterate

    kind = module.SyncVectorEnv
    init, step = kind.__init__, kind.step
    modes = getattr(module, "AutoresetMode", None)

    def new_init(self: Any, env_fns: Any, *args: Any, **named: Any) -> None:
        self._as_before = len(args) < 3 and "autoreset_mode" not in named
        if self._as_before and modes is not None:
            named["autoreset_mode"] = modes.SAME_STEP
        init(self, env_fns, *args, **named)

    def new_step(self: Any, actions: Any) -> Any:
        if not self._as_before:
            return step(self, actions)
        observations: list[Any] = []
        infos: dict[str, Any] = {}
        for i, (env, action) in enumerate(zip(self.envs, iterate(self.action_space, actions))):  # noqa: B905  since 3.10
            seen, self._rewards[i], self._terminations[i], self._truncations[i], info = env.step(action)
            if self._terminations[i] or self._truncations[i]:
                last, said = seen, _one_number_arrays(info)
                seen, info = env.reset()
                info = {**info, "final_observation": last, "final_info": said}
            observations.append(seen)
            _collect(infos, info, i, self.num_envs)
        self._observations = concatenate(self.single_observation_space, observations, self._observations)
        seen = deepcopy(self._observations) if self.copy else self._observations
        return seen, np.copy(self._rewards), np.copy(self._terminations), np.copy(self._truncations), infos

    kind.__init__, kind.step = new_init, new_step


def _one_number_arrays(info: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    if isinstance(info.get("episode"), dict):
        kinds = {"r": np.float32, "l": np.int32, "t": np.float32}
        told = {
            key: np.asarray([value], kinds.get(key)) for key, value in info["episode"].items() if np.ndim(value) == 0
        }
        return {**info, "episode": {**info["episode"], **told}}
    return info


def _collect(infos: dict[str, Any], info: dict[str, Any], index: int, count: int) -> None:
    """One array over all environments per key, with a mask: numbers as numbers, everything else as objects."""
    import numpy as np

    for key, value in info.items():
        if key not in infos:
            number = isinstance(value, (bool, int, float, np.number))
            infos[key] = np.zeros(count, dtype=type(value)) if number else np.full(count, None, dtype=object)
            infos["_" + key] = np.zeros(count, dtype=bool)
        infos[key][index], infos["_" + key][index] = value, True


def _space_may_be_left_out(module: ModuleType) -> None:
    kind = module.TransformObservation
    init = kind.__init__

    def new_init(self: Any, env: Any, func: Any, observation_space: Any = None) -> None:
        init(self, env, func, observation_space)

    kind.__init__ = new_init


RENAMED = {"GrayScaleObservation": "GrayscaleObservation", "FrameStack": "FrameStackObservation"}


def _old_names(module: ModuleType) -> None:
    for old, new in RENAMED.items():
        if not hasattr(module, old) and hasattr(module, new):
            setattr(module, old, getattr(module, new))


def _closes_under_wandb(module: ModuleType) -> None:
    """`wandb.init(monitor_gym=True)` gives `RecordVideo` a `close` that asks for `enabled` and uploads `path`."""
    kind = getattr(module, "RecordVideo", None)
    if kind is not None and not hasattr(kind, "enabled"):
        kind.enabled = False


def _registers_atari(_: ModuleType) -> None:
    with contextlib.suppress(ImportError):
        importlib.import_module("ale_py")


PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "gymnasium": _registers_atari,
    "gymnasium.wrappers": _old_names,
    "gymnasium.wrappers.rendering": _closes_under_wandb,
    "gymnasium.vector.sync_vector_env": _same_step,
    "gymnasium.wrappers.transform_observation": _space_may_be_left_out,
}


class _Patching(importlib.abc.Loader):
    """Loads a module as its own loader would, then patches it."""

    def __init__(self, own: Any, patch: Callable[[ModuleType], None]) -> None:
        self._own, self._patch = own, patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._own.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        # Packages are asked for their resources through their loader, which must be their own.
        module.__loader__ = self._own
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        self._own.exec_module(module)
        self._patch(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Steps in for the modules named in PATCHES and for no other."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _Patching(spec.loader, PATCHES[name])
        return spec


def _run_the_one_we_hide() -> None:
    """Only the first sitecustomize on the path is imported; the machine's own must not be lost by that."""
    here = os.path.dirname(os.path.realpath(__file__))
    others = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _Finder())
    _run_the_one_we_hide()
