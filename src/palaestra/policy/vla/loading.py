"""Load pretrained vision-language-action models: find the class, read the weights, and load them name by name.

safetensors files contain only tensors. A torch archive is a pickle, and so a program; it is read with `weights_only`,
which builds tensors and rejects every other instruction. Weights that do not fit are reported with counts and names: a
model whose weights silently stayed random looks like a bad algorithm.
"""

from __future__ import annotations

import functools
import json
import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn

from palaestra.config import closest_names, import_address, parse_section
from palaestra.errors import ConfigError
from palaestra.policy.config import VLAConfig
from palaestra.policy.vla.policy import PLACE, match_prefix, parameter_names, seed_global_generator

PATH_PLACE = f"{PLACE}.model_path"
ARCHIVES = (".pt", ".pth", ".bin", ".ckpt")
STATE_DICT_KEYS = ("state_dict", "model", "model_state_dict", "policy_state_dict")
WRAPPER_PREFIXES = ("module.", "_orig_mod.")
"""Prefixes that DistributedDataParallel and torch.compile add to every name."""
RESAVE = "Re-save its weights as safetensors where you trust the file (docs/vla.md shows the three lines)"

# The flag is bound once, so that no call can omit it.
_load_tensors = functools.partial(torch.load, map_location="cpu", weights_only=True)


def load_vla_model(
    config: VLAConfig | None = None,
    *,
    action_dim: int | None = None,
    chunk: int = 1,
    observation_space: gymnasium.Space[Any] | None = None,
    seed: int = 0,
    pretrained: bool = True,
    notices: list[str] | None = None,
    **settings: Any,
) -> nn.Module:
    """Build the model of `config` (or of its keys as keyword arguments) and load its weights.

    The class is called with `model_config`, and with `action_dim`, `chunk` and `observation_space` if it has such
    parameters and `model_config` does not set them. Weights that no file contains are initialised from `seed`.
    `pretrained=False` does not read the file, for a checkpoint that contains all weights. Messages for the user are
    appended to `notices`.
    """
    config = config or parse_section(VLAConfig, settings, place=PLACE)
    cls = _import_class(config.model_class)
    keywords = dict(config.settings)
    checkpoint_config = getattr(cls, "checkpoint_config", None)
    if checkpoint_config is not None and config.model_path is not None:
        keywords = {**checkpoint_config(config.model_path), **keywords}
    offered = {"action_dim": action_dim, "chunk": chunk, "observation_space": observation_space}
    names = parameter_names(cls)
    keywords |= {k: v for k, v in offered.items() if k in names and k not in keywords and v is not None}
    # Models initialise themselves from torch's global generator.
    with seed_global_generator(seed):
        try:
            model: nn.Module = cls(**keywords)
        except ConfigError:
            raise
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, ImportError, OSError) as error:
            message = " ".join(f"{type(error).__name__}: {error}".split())
            reason = f"{config.model_class} refused it ({message})"
            remedy = f"It takes {', '.join(sorted(names)) or 'nothing'}"
            raise ConfigError(f"{PLACE}.model_config", dict(config.settings), reason, remedy) from error
    if config.model_path is not None and pretrained:
        _load_weights(model, config.model_path, config.strict, [] if notices is None else notices)
    return model


def _import_class(address: str) -> Any:
    place = f"{PLACE}.model_class"
    module, _, name = address.partition(":") if ":" in address else address.rpartition(".")
    if not (module and name):
        remedy = "Write package.module:Class, or package.module.Class"
        raise ConfigError(place, address, "names no class in a module", remedy)
    try:
        cls = import_address(f"{module}:{name}", place=place)
    except ConfigError as error:
        remedy = "Check the address, and that the directory of the module is on PYTHONPATH"
        raise ConfigError(place, address, error.reason, remedy) from error
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        kind = f"the class {cls.__qualname__}" if isinstance(cls, type) else f"a {type(cls).__name__}"
        reason = f"is not a subclass of torch.nn.Module but {kind}"
        raise ConfigError(place, address, reason, "Derive it from torch.nn.Module")
    return cls


def _load_weights(model: nn.Module, path: str, strict: bool, notices: list[str]) -> None:
    tensors = read_weights(path)
    rename = getattr(model, "checkpoint_weights", None)
    if rename is not None:
        tensors = rename(tensors)
    fresh = tuple(getattr(model, "fresh_weights", ()))
    report = fit_weights(model, tensors, path=path, strict=strict, fresh=fresh)
    if report.stripped:
        notices.append(f"{path}: every name begins with {report.stripped!r}, which was taken off.")
    if not report.fits:
        notices.append(f"{path}: {report.summary} (policy.vla_config.strict is false).")


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read all tensors of a file or directory by name."""
    place = Path(path).expanduser()
    if not place.exists():
        raise _not_found(place)
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(place):
        if file.suffix == ".safetensors":
            tensors |= _read_safetensors(file)
        elif file.suffix in ARCHIVES:
            tensors |= _read_archive(file)
        else:
            known = ", ".join((".safetensors", *ARCHIVES))
            reason = f"{file.suffix or 'a file without suffix'} is not read (only {known})"
            raise ConfigError(PATH_PLACE, str(file), reason, RESAVE)
    if not tensors:
        raise ConfigError(PATH_PLACE, str(path), "holds no weights", "Name the file that does")
    return tensors


def _not_found(path: Path) -> ConfigError:
    parent = path.parent
    if not parent.is_dir():
        return ConfigError(PATH_PLACE, str(path), f"there is no directory {str(parent)!r}", "Check the path")
    names = sorted(entry.name for entry in parent.iterdir())
    weights = [name for name in names if name.endswith((".safetensors", *ARCHIVES))]
    close = closest_names(path.name, names) or weights[:3]
    remedy = f"In {str(parent)!r} there is {', '.join(close)}" if close else f"{str(parent)!r} holds no weights"
    return ConfigError(PATH_PLACE, str(path), "no such file", remedy)


def _weight_files(path: Path) -> list[Path]:
    """The files that together hold one model: a file itself, the shards of an index, or those of a directory."""
    if path.is_dir():
        path = _main_file(path)
    if not path.name.endswith(".index.json"):
        return [path]
    try:
        shards = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [path.parent / shard for shard in shards]
        missing = [file.name for file in files if not file.is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"is not an index of shards ({type(error).__name__}: {error})"
        raise ConfigError(PATH_PLACE, str(path), reason, "Download it again") from None
    if missing:
        reason = f"{len(missing)} of the {len(files)} shards it lists are not there ({', '.join(missing[:3])})"
        raise ConfigError(PATH_PLACE, str(path), reason, "Download them as well")
    return files


def _main_file(directory: Path) -> Path:
    for pattern in ("*.safetensors.index.json", "*.safetensors", "*.bin.index.json", "*.bin", "*.pt", "*.pth"):
        files = sorted(directory.glob(pattern))
        # Other tensors (statistics, optimiser state) may lie beside the weights; these are the usual names.
        files = [file for file in files if file.name in ("model.safetensors", "pytorch_model.bin")] or files
        if len(files) > 1:
            names = ", ".join(file.name for file in files[:4])
            reason = f"holds several files ({names}) and no index"
            raise ConfigError(PATH_PLACE, str(directory), reason, "Name one of them")
        if files:
            return files[0]
    reason = "holds no .safetensors, .bin, .pt or .pth file"
    raise ConfigError(PATH_PLACE, str(directory), reason, "Name the file")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from None


def _read_archive(path: Path) -> dict[str, Tensor]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about other pickle protocols
            content = _load_tensors(path)
    except pickle.UnpicklingError as error:
        match = re.search(r"GLOBAL (\S+)", str(error))
        reason = "is not an archive of tensors and nothing else"
        if match:
            reason = f"reading it would run code (it asks for {match[1]}); nothing was run"
        raise ConfigError(PATH_PLACE, str(path), reason, RESAVE) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError, IndexError, TypeError) as error:
        raise _unreadable(path, error) from None
    return _find_state_dict(content, path)


def _unreadable(path: Path, error: Exception) -> ConfigError:
    message = " ".join(str(error).split())[:160] or type(error).__name__
    remedy = "It is truncated or of another kind: copy or download it again"
    return ConfigError(PATH_PLACE, str(path), f"cannot be read ({message})", remedy)


def _find_state_dict(content: Any, path: Path) -> dict[str, Tensor]:
    """The state dict that a file is, or contains under one of the usual keys."""
    candidates = [content]
    if isinstance(content, Mapping):
        candidates += [content[key] for key in STATE_DICT_KEYS if key in content]
    for candidate in candidates:
        if isinstance(candidate, Mapping) and candidate:
            tensors = {str(name): value for name, value in candidate.items() if isinstance(value, Tensor)}
            if len(tensors) == len(candidate):
                return tensors
    kind = f"keys {', '.join(map(repr, list(content)[:5]))}" if isinstance(content, Mapping) else type(content).__name__
    remedy = f"Save model.state_dict() directly, or under one of {', '.join(STATE_DICT_KEYS)}"
    raise ConfigError(PATH_PLACE, str(path), f"holds no state dict ({kind})", remedy)


@dataclass(frozen=True)
class WeightReport:
    """Which weights of a file were loaded into a model."""

    loaded: int
    missing: tuple[str, ...]
    """Weights of the model that the file does not contain; they keep their initial values."""
    unexpected: tuple[str, ...]
    """Weights of the file that the model does not have; they are ignored."""
    reshaped: tuple[str, ...]
    """Weights with different shapes in file and model."""
    stripped: str
    """The wrapper's prefix that was removed from every name of the file."""
    summary: str
    """The misfits, as counts and first names."""

    @property
    def fits(self) -> bool:
        """Whether file and model agree on all names and shapes."""
        return not (self.missing or self.unexpected or self.reshaped)


def fit_weights(
    model: nn.Module, tensors: Mapping[str, Tensor], *, path: str, strict: bool = True, fresh: Sequence[str] = ()
) -> WeightReport:
    """Load the tensors into the model; `ConfigError`, with nothing changed, if `strict` and they do not fit.

    `fresh` names parts (by prefix) that no file is expected to contain, such as a value head added for training.
    """
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    tensors, stripped = _strip_wrapper_prefix(tensors, own)
    _check_finite(tensors, path)
    fitting = {name: t for name, t in tensors.items() if name in own and own[name].shape == t.shape}
    missing = tuple(sorted(n for n in own.keys() - tensors.keys() if match_prefix(n, fresh) is None))
    unexpected = tuple(sorted(tensors.keys() - own.keys()))
    reshaped = tuple(sorted(tensors.keys() & own.keys() - fitting.keys()))
    counts = [f"{len(fitting)} of {len(own)} weights fit"]
    if missing:
        close = closest_names(missing[0], unexpected, count=1)
        hint = f"; nearest in the file: {close[0]!r}" if close else ""
        counts.append(f"{len(missing)} missing ({_first_names(missing)}{hint})")
    if unexpected:
        counts.append(f"{len(unexpected)} unexpected ({_first_names(unexpected)})")
    if reshaped:
        first = reshaped[0]
        shapes = f"{first!r} is {tuple(tensors[first].shape)} in the file and {tuple(own[first].shape)} in the model"
        counts.append(f"{len(reshaped)} of another shape ({shapes})")
    report = WeightReport(len(fitting), missing, unexpected, reshaped, stripped, summary=", ".join(counts))
    if (strict and not report.fits) or not fitting:
        remedy = "Use the class and model_config it was saved from"
        if fitting:
            remedy += ", or set policy.vla_config.strict=false to load what fits"
        raise ConfigError(PATH_PLACE, path, report.summary, remedy)
    model.load_state_dict(fitting, strict=False)
    return report


def _first_names(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (", …" if len(names) > 3 else "")


def _strip_wrapper_prefix(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    stripped = ""
    for prefix in 2 * WRAPPER_PREFIXES:  # either may be the outer one
        if all(n.startswith(prefix) for n in tensors) and not any(n.startswith(prefix) for n in own):
            tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
            stripped += prefix
    return dict(tensors), stripped


def _check_finite(tensors: Mapping[str, Tensor], path: str) -> None:
    broken = [n for n, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    if broken:
        reason = f"{len(broken)} of {len(tensors)} tensors hold numbers that are not finite ({_first_names(broken)})"
        remedy = "The training that wrote it had diverged: use an earlier checkpoint"
        raise ConfigError(PATH_PLACE, path, reason, remedy)
