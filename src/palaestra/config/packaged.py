"""The configurations that come with the package, and the word of a command line that names one.

`palaestra train WORD` takes a file, the name of a packaged configuration (`cartpole`, or with its directory
`ppo/cartpole`) or the id of an environment (`CartPole-v1`, `package.module:Class`), which trains with default settings.
A file in the current directory takes precedence over a name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palaestra.config.file import apply_overrides, read_config_file
from palaestra.config.section import closest_names
from palaestra.errors import ConfigError

ROLLOUT_LENGTH = 256
"""Steps of each environment per update of PPO, if only an environment is given. Short runs then make enough updates."""
CONFIGS = Path(__file__).parents[1] / "configs"
LIST_COMMAND = "palaestra train --list"
_SUFFIXES = (".yaml", ".yml", ".json")
_ENVIRONMENT_ID = re.compile(r"[\w./-]*\w-v\d+|[\w.]+:[\w./-]+")


@dataclass(frozen=True)
class NamedConfig:
    """A configuration as data, with the text that was read and where it came from."""

    data: dict[str, Any]
    text: str = ""
    """Content of the file; empty for an environment id."""
    path: Path | None = None
    """The file; None for an environment id."""

    def apply_overrides(self, assignments: Sequence[str]) -> dict[str, Any]:
        """The data with each `key.path=value` applied; of an environment id, with the default rollout length."""
        data = apply_overrides(self.data, assignments)
        if self.path is None and self.data:
            set_default_rollout_length(data)
        return data


def set_default_rollout_length(data: dict[str, Any]) -> None:
    """Set `ROLLOUT_LENGTH` for PPO in a configuration without a file, unless the configuration has a length."""
    algorithm, trainer = data.get("algorithm") or {}, data.get("trainer") or {}
    if not isinstance(algorithm, Mapping) or not isinstance(trainer, Mapping):
        return  # refused by the parser
    if algorithm.get("name") in (None, "ppo") and not {"rollout_length", "buffer_size"} & trainer.keys():
        data["trainer"] = {**trainer, "rollout_length": ROLLOUT_LENGTH}


def packaged_configs() -> dict[str, Path]:
    """The files of the packaged configurations by name: those of PPO, then by directory."""
    files = sorted(CONFIGS.rglob("*.yaml"), key=lambda path: (path.parent.name != "ppo", path))
    return {path.stem: path for path in files}


def find_packaged(word: str) -> Path | None:
    """The packaged configuration of a name, alone or with its directory; None if there is none."""
    for name, path in packaged_configs().items():
        if word in (name, path.relative_to(CONFIGS).with_suffix("").as_posix()):
            return path
    return None


def read_config(word: str, *, allow_environment: bool = True) -> NamedConfig:
    """The configuration that a word names; without `allow_environment`, an environment id is refused."""
    path = Path(word)
    # Not `is_file`: a configuration may come from /dev/stdin or another pipe.
    if not (path.exists() or path.suffix in _SUFFIXES) or path.is_dir():
        packaged = find_packaged(word)
        if packaged is not None:
            path = packaged
        elif allow_environment and _ENVIRONMENT_ID.fullmatch(word):
            return NamedConfig({"env": {"id": word}})
        elif not path.is_dir():
            raise _unknown_name_error(word, allow_environment)
    hint = f"List the packaged configurations with: {LIST_COMMAND}"
    return NamedConfig(read_config_file(path, hint), path.read_text(encoding="utf-8"), path)


def read_runner_config(word: str, runner: str) -> NamedConfig:
    """The configuration of a run; for other runners than `palaestra` the word is the path of a file."""
    if runner == "palaestra":
        return read_config(word)
    path = Path(word)
    return NamedConfig(read_config_file(path), path.read_text(encoding="utf-8"), path)


def describe_config(path: Path) -> str:
    """The first sentence or clause of the comment that a configuration begins with."""
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").strip())
    return re.split(r"(?<=[^.])\.(?: |$)|, made by: ", " ".join(comment), maxsplit=1)[0]


def configs_for(env_id: str) -> list[str]:
    """Names of the packaged configurations that train in an environment without a dataset."""
    names = []
    for name, path in packaged_configs().items():
        data = read_config_file(path)
        if "dataset" not in data and isinstance(data.get("env"), dict) and data["env"].get("id") == env_id:
            names.append(name)
    return names


def _unknown_name_error(word: str, allow_environment: bool) -> ConfigError:
    environment = ", a packaged configuration or an environment id" if allow_environment else " or a packaged name"
    close = closest_names(word, packaged_configs(), count=1)
    remedy = f"Did you mean {close[0]!r}?" if close else f"List the packaged ones with: {LIST_COMMAND}"
    return ConfigError("CONFIG", word, f"is not a file{environment}", remedy)
