"""How one Gymnasium environment is made: an importable, picklable recipe that another process can follow.

Owns the three spellings of an environment (a Gymnasium id, a `module:factory` address, Gymnasium's own `module:Id`)
and turns every way of failing to make one into a single line that names the field and the remedy. Refuses closures:
a recipe is text and plain values, so it travels to a worker. Driven by `catalogue.make_env`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import gymnasium
from gymnasium import error as gymnasium_error
from gymnasium.wrappers import TimeLimit

from palaestra.config import closest_names
from palaestra.env.chunk import ActionChunk
from palaestra.errors import ConfigError, PalaestraError, UnknownEnvironment

__all__ = ["EnvRecipe", "missing_dependency", "quiet_gymnasium"]

_DEPENDENCIES = {
    "gymnasium.envs.box2d": ("Box2D", "pip install 'palaestra[box2d]'"),
    "gymnasium.envs.mujoco": ("mujoco", "pip install 'palaestra[mujoco]'"),
    "palaestra.env.table_mujoco": ("mujoco", "pip install 'palaestra[mujoco]'"),
    "gymnasium.envs.phys2d": ("jax", "pip install 'gymnasium[jax]'"),
    "gymnasium.envs.tabular": ("jax", "pip install 'gymnasium[jax]'"),
}


@dataclass(frozen=True)
class EnvRecipe:
    """Makes one environment each time it is called."""

    id: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_episode_steps: int | None = None
    action_chunk: int = 1

    def __call__(self) -> gymnasium.Env[Any, Any]:
        """A new environment, or a `ConfigError` that says why not."""
        env = self._single()
        return env if self.action_chunk == 1 else ActionChunk(env, self.action_chunk)

    def _single(self) -> gymnasium.Env[Any, Any]:
        factory = self.factory()
        if factory is None:
            return self._registered()
        try:
            env = factory(**self.kwargs)
        except PalaestraError:
            raise
        except TypeError as error:
            raise self._bad_arguments(error) from error
        except Exception as error:
            raise self._failed(error) from error
        if not isinstance(env, gymnasium.Env):
            reason = f"it made a {type(env).__name__}, not a gymnasium.Env"
            raise ConfigError("env.id", self.id, reason, "Return a gymnasium.Env from the factory")
        return env if self.max_episode_steps is None else TimeLimit(env, self.max_episode_steps)

    def factory(self) -> Callable[..., Any] | None:
        """What a `module:attribute` address names; None when the id is one of Gymnasium's."""
        module_name, colon, attribute = self.id.partition(":")
        if not colon:
            return None
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            reason = f"the module {module_name!r} cannot be imported ({error})"
            raise UnknownEnvironment(
                "env.id", self.id, reason, "Write an importable 'package.module:factory'"
            ) from error
        found = getattr(module, attribute, None)
        if found is None:
            # Gymnasium's own form: importing the module has registered the id that follows.
            if attribute in gymnasium.registry:
                return None
            known = [name for name in vars(module) if not name.startswith("_")]
            close = closest_names(attribute, known)
            remedy = f"Nearest: {', '.join(close)}" if close else "Check the part after the colon"
            raise UnknownEnvironment("env.id", self.id, f"{module_name!r} has no {attribute!r}", remedy)
        if not callable(found):
            reason = f"{attribute!r} is a {type(found).__name__}, which cannot be called"
            raise ConfigError("env.id", self.id, reason, "Name a class or a function that makes an environment")
        return found  # type: ignore[no-any-return]

    def spec(self) -> Any:
        """Gymnasium's registration of this id, or None for an address; `UnknownEnvironment` when there is none."""
        if self.factory() is not None:
            return None
        try:
            with quiet_gymnasium():
                # An address has been imported by now; only its id is in the registry.
                return gymnasium.spec(self.id.partition(":")[2] or self.id)
        except gymnasium_error.Error as error:
            raise _unknown(self.id, error) from None

    def _registered(self) -> gymnasium.Env[Any, Any]:
        self.spec()
        try:
            with quiet_gymnasium():
                return gymnasium.make(
                    self.id, max_episode_steps=self.max_episode_steps, disable_env_checker=True, **self.kwargs
                )
        except gymnasium_error.DependencyNotInstalled as error:
            raise self.needs(error) from None
        except ImportError as error:
            raise self.needs(error) from error
        except TypeError as error:
            raise self._bad_arguments(error) from error
        except Exception as error:
            raise self._failed(error) from error

    def needs(self, error: Exception) -> UnknownEnvironment:
        """The refusal for an environment whose package is not installed, with the command that installs it."""
        spec = self.spec()
        missing = missing_dependency(spec.entry_point or spec.vector_entry_point)
        remedy = missing[1] if missing else "Install what it needs"
        reason = "it needs a package that is not installed" + (f" ({missing[0]})" if missing else f" ({_line(error)})")
        return UnknownEnvironment("env.id", self.id, reason, remedy)

    def _bad_arguments(self, error: Exception) -> ConfigError:
        return ConfigError(
            "env.kwargs", dict(self.kwargs), f"{self.id} does not take these ({_line(error)})", "Change env.kwargs"
        )

    def _failed(self, error: Exception) -> ConfigError:
        reason = f"making it failed with {type(error).__name__}: {_line(error)}"
        return ConfigError("env.id", self.id, reason, "Make it once by itself in Python to see the whole traceback")


def missing_dependency(entry_point: object) -> tuple[str, str] | None:
    """The package an entry point needs and how to install it; None when it is there. Imports nothing heavy."""
    if not isinstance(entry_point, str):
        return None
    module = entry_point.partition(":")[0]
    for prefix, (package, remedy) in _DEPENDENCIES.items():
        if module.startswith(prefix):
            return None if _installed(package) else (package, remedy)
    package = module.partition(".")[0]
    return None if _installed(package) else (package, f"pip install {package}")


@contextlib.contextmanager
def quiet_gymnasium() -> Iterator[None]:
    """Keep two of Gymnasium's remarks from the user: old versions run on purpose, and we store float32 anyway."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*is out of date")
        warnings.filterwarnings("ignore", message=r"(?s).*precision lowered by casting")
        yield


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _unknown(name: str, error: Exception) -> UnknownEnvironment:
    close = closest_names(name.partition(":")[2] or name, gymnasium.registry)
    remedy = f"Nearest: {', '.join(close)}" if close else "`palaestra envs` lists what can be trained on here"
    if isinstance(error, gymnasium_error.VersionNotFound | gymnasium_error.DeprecatedEnv):
        reason = "there is no such version"
    elif isinstance(error, gymnasium_error.NamespaceNotFound):
        reason = "there is no such namespace (is the package that registers it installed?)"
    else:
        reason = "no environment has this name"
    return UnknownEnvironment("env.id", name, reason, remedy)


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
