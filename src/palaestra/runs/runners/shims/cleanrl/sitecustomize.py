"""Run scripts for Gymnasium 0.29 with Gymnasium 1: on PYTHONPATH, without changes to the script.

Since version 1, a vector environment resets in the next step and reports an ended episode in another format. Scripts
that read `infos["final_info"]` never see the end of an episode. This module restores the behaviour of 0.29 where the
script does not choose otherwise: `SyncVectorEnv` resets in the same step and reports `final_info` and
`final_observation`; return and length of an episode are arrays with one element; the space of `TransformObservation` is
optional; `GrayScaleObservation` and `FrameStack` exist; the environments of an installed `ale_py` are registered. W&B
replaces `RecordVideo.close` with a function for 0.29, which would fail after training; this is fixed as well. Modules
are patched when they are imported, so that other programs are not affected.
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


def _patch_sync_vector_env(module: ModuleType) -> None:
    """Make `SyncVectorEnv` reset in the same step, and report the final observation and info."""
    import numpy as np
    from gymnasium.vector.utils import concatenate, iterate

    cls = module.SyncVectorEnv
    init, step = cls.__init__, cls.step
    modes = getattr(module, "AutoresetMode", None)

    def new_init(self: Any, env_fns: Any, *args: Any, **kwargs: Any) -> None:
        self._legacy = len(args) < 3 and "autoreset_mode" not in kwargs
        if self._legacy and modes is not None:
            kwargs["autoreset_mode"] = modes.SAME_STEP
        init(self, env_fns, *args, **kwargs)

    def new_step(self: Any, actions: Any) -> Any:
        if not self._legacy:
            return step(self, actions)
        observations: list[Any] = []
        infos: dict[str, Any] = {}
        for i, (env, action) in enumerate(zip(self.envs, iterate(self.action_space, actions))):  # noqa: B905  since 3.10
            observation, self._rewards[i], self._terminations[i], self._truncations[i], info = env.step(action)
            if self._terminations[i] or self._truncations[i]:
                final_observation, final_info = observation, _with_array_summary(info)
                observation, info = env.reset()
                info = {**info, "final_observation": final_observation, "final_info": final_info}
            observations.append(observation)
            _merge_info(infos, info, i, self.num_envs)
        self._observations = concatenate(self.single_observation_space, observations, self._observations)
        batch = deepcopy(self._observations) if self.copy else self._observations
        return batch, np.copy(self._rewards), np.copy(self._terminations), np.copy(self._truncations), infos

    cls.__init__, cls.step = new_init, new_step


def _with_array_summary(info: dict[str, Any]) -> dict[str, Any]:
    """The info with the numbers of its episode summary as arrays with one element."""
    import numpy as np

    if isinstance(info.get("episode"), dict):
        dtypes = {"r": np.float32, "l": np.int32, "t": np.float32}
        summary = {
            key: np.asarray([value], dtypes.get(key)) for key, value in info["episode"].items() if np.ndim(value) == 0
        }
        return {**info, "episode": {**info["episode"], **summary}}
    return info


def _merge_info(infos: dict[str, Any], info: dict[str, Any], index: int, count: int) -> None:
    """Add the info of one environment: per key an array over all environments, and a mask."""
    import numpy as np

    for key, value in info.items():
        if key not in infos:
            is_number = isinstance(value, (bool, int, float, np.number))
            infos[key] = np.zeros(count, dtype=type(value)) if is_number else np.full(count, None, dtype=object)
            infos["_" + key] = np.zeros(count, dtype=bool)
        infos[key][index], infos["_" + key][index] = value, True


def _patch_transform_observation(module: ModuleType) -> None:
    cls = module.TransformObservation
    init = cls.__init__

    def new_init(self: Any, env: Any, func: Any, observation_space: Any = None) -> None:
        init(self, env, func, observation_space)

    cls.__init__ = new_init


RENAMED = {"GrayScaleObservation": "GrayscaleObservation", "FrameStack": "FrameStackObservation"}


def _add_old_names(module: ModuleType) -> None:
    for old, new in RENAMED.items():
        if not hasattr(module, old) and hasattr(module, new):
            setattr(module, old, getattr(module, new))


def _patch_record_video(module: ModuleType) -> None:
    """`wandb.init(monitor_gym=True)` replaces `close` by a function that reads `enabled`."""
    cls = getattr(module, "RecordVideo", None)
    if cls is not None and not hasattr(cls, "enabled"):
        cls.enabled = False


def _register_atari(_: ModuleType) -> None:
    with contextlib.suppress(ImportError):
        importlib.import_module("ale_py")


PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "gymnasium": _register_atari,
    "gymnasium.wrappers": _add_old_names,
    "gymnasium.wrappers.rendering": _patch_record_video,
    "gymnasium.vector.sync_vector_env": _patch_sync_vector_env,
    "gymnasium.wrappers.transform_observation": _patch_transform_observation,
}


class _PatchingLoader(importlib.abc.Loader):
    """Loads a module with its own loader, then patches it."""

    def __init__(self, loader: Any, patch: Callable[[ModuleType], None]) -> None:
        self._loader, self._patch = loader, patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Resources of a package are read through its loader, which must be the original one.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._patch(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds only the modules in PATCHES."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _PatchingLoader(spec.loader, PATCHES[name])
        return spec


def _run_hidden_sitecustomize() -> None:
    """Run the next sitecustomize on the path, because Python imports only the first."""
    here = os.path.dirname(os.path.realpath(__file__))
    others = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _Finder())
    _run_hidden_sitecustomize()
