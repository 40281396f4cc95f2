"""`EnvFactory` makes one Gymnasium environment from an id or an address, and can be pickled for another process.

An id is a Gymnasium id (`CartPole-v1`), an address `module:factory`, or Gymnasium's own form `module:Id`. Every failure
becomes a `ConfigError` that names the field and the remedy.

`describe_exception` describes an exception of an environment with the line of the user's code that raised it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import error as gymnasium_error
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import TimeLimit

from palaestra.config import closest_names, import_own_module
from palaestra.env.vector import Array, GymEnv, Info
from palaestra.errors import ConfigError, PalaestraError, UnknownEnvironment

_DEPENDENCIES = {
    "gymnasium.envs.box2d": ("Box2D", "pip install 'palaestra[box2d]'"),
    "gymnasium.envs.mujoco": ("mujoco", "pip install 'palaestra[mujoco]'"),
    "palaestra.env.table.mujoco": ("mujoco", "pip install 'palaestra[mujoco]'"),
    "gymnasium.envs.phys2d": ("jax", "pip install 'gymnasium[jax]'"),
    "gymnasium.envs.tabular": ("jax", "pip install 'gymnasium[jax]'"),
}

_PACKAGE = str(Path(__file__).parents[1])
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class EnvFactory:
    """Makes a new environment at each call. Holds text and plain values only, so that it can be pickled."""

    id: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_episode_steps: int | None = None
    action_chunk: int = 1

    def __call__(self) -> GymEnv:
        """Make an environment, or raise a `ConfigError` with the reason."""
        factory = self.find_callable()
        env = self._make_registered() if factory is None else self._call(factory)
        return env if self.action_chunk == 1 else ActionChunk(env, self.action_chunk)

    def _call(self, factory: Callable[..., Any]) -> GymEnv:
        try:
            env = factory(**self.kwargs)
        except PalaestraError:
            raise
        except Exception as error:
            raise self._construction_error(error) from error
        if not isinstance(env, gymnasium.Env):
            reason = f"it returned a {type(env).__name__}, not a gymnasium.Env"
            raise ConfigError("env.id", self.id, reason, "Return a gymnasium.Env from the factory")
        return env if self.max_episode_steps is None else TimeLimit(env, self.max_episode_steps)

    def find_callable(self) -> Callable[..., Any] | None:
        """Import the class or function of a `module:attribute` address; None for a Gymnasium id."""
        module_name, colon, attribute = self.id.partition(":")
        if not colon:
            return None
        try:
            module = import_own_module(module_name)
        except ImportError as error:
            reason = f"the module {module_name!r} cannot be imported ({error})"
            remedy = "Start the command in the directory of the module, or install its package"
            raise UnknownEnvironment("env.id", self.id, reason, remedy) from error
        factory: Any = getattr(module, attribute, None)
        if factory is None:
            # Gymnasium's own form: importing the module has registered the id after the colon.
            if attribute in gymnasium.registry:
                return None
            close = closest_names(attribute, [name for name in vars(module) if not name.startswith("_")])
            remedy = f"Nearest: {', '.join(close)}" if close else "Check the part after the colon"
            raise UnknownEnvironment("env.id", self.id, f"{module_name!r} has no {attribute!r}", remedy)
        if not callable(factory):
            reason = f"{attribute!r} is a {type(factory).__name__}, which cannot be called"
            raise ConfigError("env.id", self.id, reason, "Name a class or a function that makes an environment")
        return factory  # type: ignore[no-any-return]

    def find_spec(self) -> EnvSpec | None:
        """Gymnasium's registration of this id, None for an address; `UnknownEnvironment` if it is not registered."""
        if self.find_callable() is not None:
            return None
        try:
            with suppress_gymnasium_warnings():
                # The module of an address has been imported by now; the registry holds only the id.
                return gymnasium.spec(self.id.partition(":")[2] or self.id)
        except gymnasium_error.Error as error:
            raise _unknown_id_error(self.id, error) from None

    def _make_registered(self) -> GymEnv:
        self.find_spec()
        try:
            with suppress_gymnasium_warnings():
                return gymnasium.make(
                    self.id, max_episode_steps=self.max_episode_steps, disable_env_checker=True, **self.kwargs
                )
        except gymnasium_error.DependencyNotInstalled as error:
            raise self.missing_dependency_error(error) from None
        except ImportError as error:
            raise self.missing_dependency_error(error) from error
        except Exception as error:
            raise self._construction_error(error) from error

    def missing_dependency_error(self, error: Exception) -> UnknownEnvironment:
        """The error for an environment whose package is not installed, with the command that installs it."""
        spec = self.find_spec()
        missing = None if spec is None else missing_dependency(spec.entry_point or spec.vector_entry_point)
        package, remedy = missing or (_first_line(error), "Install what it needs")
        reason = f"it needs a package that is not installed ({package})"
        return UnknownEnvironment("env.id", self.id, reason, remedy)

    def _construction_error(self, error: Exception) -> ConfigError:
        if isinstance(error, TypeError):
            reason = f"{self.id} does not take these ({_first_line(error)}){locate_user_code(error)}"
            return ConfigError("env.kwargs", dict(self.kwargs), reason, "Change env.kwargs")
        reason = f"making it failed with {type(error).__name__}: {_first_line(error)}{locate_user_code(error)}"
        return ConfigError("env.id", self.id, reason, "Make it alone in Python to see the whole traceback")


class ActionChunk(gymnasium.Wrapper[Any, Array, Any, Any]):
    """Turns `Box` actions of shape (d,) into chunks of shape (k, d), executed open-loop, one after the other.

    The reward is the sum over the chunk. A chunk stops at the end of the episode; `info["actions_executed"]` is the
    number of executed actions, because only those count in the log-probability of the chunk.
    """

    EXECUTED: ClassVar[str] = "actions_executed"

    def __init__(self, env: GymEnv, chunk: int) -> None:
        super().__init__(env)
        space = env.action_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            reason = f"chunks need Box actions of shape (d,), this environment has {space}"
            raise ConfigError("env.action_chunk", chunk, reason, "Leave env.action_chunk out")
        low, high = (np.broadcast_to(bound, (chunk, *space.shape)) for bound in (space.low, space.high))
        self.action_space = spaces.Box(low, high, dtype=space.dtype.type)

    def step(self, action: Array) -> tuple[Any, float, bool, bool, Info]:
        """Execute the chunk, at most until the episode ends."""
        total, executed = 0.0, 0
        for single in action:
            executed += 1
            observation, reward, terminated, truncated, info = self.env.step(single)
            total += float(reward)
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, {**info, self.EXECUTED: executed}


def missing_dependency(entry_point: object) -> tuple[str, str] | None:
    """The package that an entry point needs and how to install it; None if it is installed. Imports nothing heavy."""
    if not isinstance(entry_point, str):
        return None
    module = entry_point.partition(":")[0]
    package = module.partition(".")[0]
    dependency = (package, f"pip install {package}")
    for prefix, known in _DEPENDENCIES.items():
        if module.startswith(prefix):
            dependency = known
            break
    return None if _is_installed(dependency[0]) else dependency


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


@contextlib.contextmanager
def suppress_gymnasium_warnings() -> Iterator[None]:
    """Hide two Gymnasium warnings: old versions are used on purpose, and observations are stored as float32 anyway."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*is out of date")
        warnings.filterwarnings("ignore", message=r"(?s).*precision lowered by casting")
        yield


def _unknown_id_error(name: str, error: Exception) -> UnknownEnvironment:
    close = closest_names(name.partition(":")[2] or name, gymnasium.registry)
    remedy = f"Nearest: {', '.join(close)}" if close else "`palaestra envs` lists what can be trained on here"
    if isinstance(error, gymnasium_error.VersionNotFound | gymnasium_error.DeprecatedEnv):
        reason = "there is no such version"
    elif isinstance(error, gymnasium_error.NamespaceNotFound):
        reason = "there is no such namespace (is the package that registers it installed?)"
    else:
        reason = "no environment has this name"
    return UnknownEnvironment("env.id", name, reason, remedy)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def describe_exception(error: Exception) -> str:
    """Type, text and place of an exception, such as `KeyError: 'speed' (walk.py:11, in step)`."""
    return f"{type(error).__name__}: {str(error).rstrip('.')}{locate_user_code(error)}"


def locate_user_code(error: Exception) -> str:
    """The innermost frame of the user's code, such as ` (walk.py:11, in step)`; empty if there is none.

    Frames of Palaestra, of the standard library and of installed packages are skipped: an exception that NumPy raises
    is usually caused by the line that calls it.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not _is_library(frame.filename):
            return f" ({_shorten_path(frame.filename)}:{frame.lineno}, in {frame.name})"
    return ""


def _is_library(filename: str) -> bool:
    parts = Path(filename).parts
    if filename.startswith("<frozen ") or "site-packages" in parts or "dist-packages" in parts:
        return True
    return any(Path(filename).is_relative_to(folder) for folder in (_PACKAGE, *_INSTALLED))


def _shorten_path(filename: str) -> str:
    """The path relative to the current directory, if it is below it."""
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename
