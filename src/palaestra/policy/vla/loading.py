"""Weights of a pretrained model: read from files without running anything in them, and fitted name by name.

safetensors holds tensors and nothing else. A torch archive is a pickle, a program; it is read by torch's
`weights_only` interpreter, which knows how to build tensors and refuses every other instruction. Whatever does not fit
is reported with counts and names, because a model trained on weights that silently stayed random looks like a bad
algorithm.
"""

from __future__ import annotations

import functools
import json
import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn

from palaestra.config import closest_names, import_address, parse_section
from palaestra.errors import ConfigError
from palaestra.policy.config import VLAConfig
from palaestra.policy.vla.policy import PLACE, _in_one_line, _parameters_of, _seeded_globally, under

__all__ = ["WeightReport", "fit_weights", "load_vla_model", "read_weights"]

PATH_PLACE = "policy.vla_config.model_path"
ARCHIVES = (".pt", ".pth", ".bin", ".ckpt")
WRAPPERS = ("state_dict", "model", "model_state_dict", "policy_state_dict")
PREFIXES = {"module.": "DistributedDataParallel", "_orig_mod.": "torch.compile"}
RESAVE = "Re-save its weights as safetensors where you trust the file (docs/vla.md shows the three lines)"

# The flag is bound here, once, so that no call can forget it.
_tensors_only = functools.partial(torch.load, map_location="cpu", weights_only=True)


@dataclass(frozen=True)
class WeightReport:
    """What became of a file's weights."""

    loaded: int
    missing: tuple[str, ...] = ()
    """Weights of the model the file does not have; they keep their first values."""
    unexpected: tuple[str, ...] = ()
    """Weights of the file the model does not have; they are left out."""
    reshaped: tuple[str, ...] = ()
    """Weights both have, in different shapes."""
    stripped: str = ""
    """The wrapper's prefix that was taken off every name of the file."""
    summary: str = ""
    """What does not fit, in counts and first names."""

    @property
    def fits(self) -> bool:
        """Whether file and model agree name by name."""
        return not (self.missing or self.unexpected or self.reshaped)


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Every tensor of a file or directory by name."""
    place = Path(path).expanduser()
    if not place.exists():
        raise _nothing_there(place)
    files = _files_of(place) if place.is_dir() or place.name.endswith(".index.json") else [place]
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _read_file(file)
    if not tensors:
        raise ConfigError(PATH_PLACE, str(path), "holds no weights", "Name the file that does")
    return tensors


def _nothing_there(path: Path) -> ConfigError:
    parent = path.parent
    if not parent.is_dir():
        return ConfigError(PATH_PLACE, str(path), f"there is no directory {str(parent)!r}", "Check the path")
    names = sorted(entry.name for entry in parent.iterdir())
    close = (
        closest_names(path.name, names) or [name for name in names if name.endswith((".safetensors", *ARCHIVES))][:3]
    )
    remedy = f"In {str(parent)!r} there is {', '.join(close)}" if close else f"{str(parent)!r} holds no weights"
    return ConfigError(PATH_PLACE, str(path), "no such file", remedy)


def _files_of(place: Path) -> list[Path]:
    """The files of a directory (or of an index in it) that together hold one model."""
    if place.is_dir():
        for pattern in ("*.safetensors.index.json", "*.safetensors", "*.bin.index.json", "*.bin", "*.pt", "*.pth"):
            found = sorted(place.glob(pattern))
            # Libraries keep other tensors (statistics, optimiser state) beside the weights; these are the usual names.
            found = [f for f in found if f.name in ("model.safetensors", "pytorch_model.bin")] or found
            if len(found) > 1:
                names = ", ".join(file.name for file in found[:4])
                raise ConfigError(
                    PATH_PLACE, str(place), f"holds several files ({names}) and no index", "Name one of them"
                )
            if found:
                place = found[0]
                break
        else:
            raise ConfigError(PATH_PLACE, str(place), "holds no .safetensors, .bin, .pt or .pth file", "Name the file")
    if not place.name.endswith(".index.json"):
        return [place]
    try:
        shards = sorted(set(json.loads(place.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [place.parent / shard for shard in shards]
        missing = [file.name for file in files if not file.is_file()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            PATH_PLACE, str(place), f"is not an index of shards ({type(error).__name__}: {error})", "Download it again"
        ) from None
    if missing:
        reason = f"{len(missing)} of the {len(files)} shards it lists are not there ({', '.join(missing[:3])})"
        raise ConfigError(PATH_PLACE, str(place), reason, "Download them as well")
    return files


def _read_file(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix in ARCHIVES:
        return _read_archive(path)
    known = ", ".join((".safetensors", *ARCHIVES))
    raise ConfigError(
        PATH_PLACE, str(path), f"{path.suffix or 'a file without suffix'} is not read (only {known})", RESAVE
    )


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
            warnings.simplefilter("ignore")  # about other pickle protocols; what matters is refused below
            content = _tensors_only(path)
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        reason = "is not an archive of tensors and nothing else"
        if asked:
            reason = f"reading it would run code of its own (it asks for {asked[1]}); nothing was run"
        raise ConfigError(PATH_PLACE, str(path), reason, RESAVE) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError, IndexError, TypeError) as error:
        raise _unreadable(path, error) from None
    return _state_dict_in(content, path)


def _unreadable(path: Path, error: Exception) -> ConfigError:
    said = " ".join(str(error).split())[:160] or type(error).__name__
    return ConfigError(
        PATH_PLACE,
        str(path),
        f"cannot be read ({said})",
        "It is truncated or of another kind: copy or download it again",
    )


def _state_dict_in(content: Any, path: Path) -> dict[str, Tensor]:
    """The state dict a file is, or holds under one of the usual names."""
    candidates = [content]
    if isinstance(content, Mapping):
        candidates += [content[key] for key in WRAPPERS if key in content]
    for candidate in candidates:
        if isinstance(candidate, Mapping) and candidate:
            tensors = {str(name): value for name, value in candidate.items() if isinstance(value, Tensor)}
            if len(tensors) == len(candidate):
                return tensors
    held = f"keys {', '.join(map(repr, list(content)[:5]))}" if isinstance(content, Mapping) else type(content).__name__
    raise ConfigError(
        PATH_PLACE, str(path), f"holds no state dict ({held})",
        f"Save model.state_dict(), by itself or under one of {', '.join(WRAPPERS)}",
    )  # fmt: skip


def fit_weights(
    model: nn.Module, tensors: Mapping[str, Tensor], *, path: str, strict: bool = True, fresh: Sequence[str] = ()
) -> WeightReport:
    """Give the model the tensors; `ConfigError`, with nothing changed, when `strict` and they do not fit.

    `fresh` names parts (by prefix) that no file is expected to hold, such as a value head added for training.
    """
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    tensors, stripped = _without_wrapper(tensors, own)
    _refuse_what_is_not_finite(tensors, path)
    fitting = {name: t for name, t in tensors.items() if name in own and own[name].shape == t.shape}
    report = WeightReport(
        loaded=len(fitting),
        missing=tuple(sorted(n for n in own.keys() - tensors.keys() if under(n, fresh) is None)),
        unexpected=tuple(sorted(tensors.keys() - own.keys())),
        reshaped=tuple(sorted(tensors.keys() & own.keys() - fitting.keys())),
        stripped=stripped,
    )
    report = replace(report, summary=_summary(report, own, tensors))
    if (strict and not report.fits) or not fitting:
        remedy = "Use the class and model_config it was saved from"
        if fitting:
            remedy += ", or set policy.vla_config.strict=false to load what fits"
        raise ConfigError(PATH_PLACE, path, report.summary, remedy)
    model.load_state_dict(fitting, strict=False)
    return report


def _summary(report: WeightReport, own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str:
    found = [f"{report.loaded} of {len(own)} weights fit"]
    if report.missing:
        first = report.missing[0]
        close = closest_names(first, report.unexpected, count=1)
        hint = f"; nearest in the file: {close[0]!r}" if close else ""
        found.append(f"{len(report.missing)} missing ({_some(report.missing)}{hint})")
    if report.unexpected:
        found.append(f"{len(report.unexpected)} unexpected ({_some(report.unexpected)})")
    if report.reshaped:
        first = report.reshaped[0]
        shapes = f"{first!r} is {tuple(tensors[first].shape)} in the file and {tuple(own[first].shape)} in the model"
        found.append(f"{len(report.reshaped)} of another shape ({shapes})")
    return ", ".join(found)


def _some(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names[:3]) + (", …" if len(names) > 3 else "")


def _without_wrapper(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], str]:
    """Names without the prefix a wrapper put before every one of them."""
    stripped = ""
    for _ in PREFIXES:
        for prefix in PREFIXES:
            if all(n.startswith(prefix) for n in tensors) and not any(n.startswith(prefix) for n in own):
                tensors = {name.removeprefix(prefix): value for name, value in tensors.items()}
                stripped += prefix
    return dict(tensors), stripped


def _refuse_what_is_not_finite(tensors: Mapping[str, Tensor], path: str) -> None:
    broken = [n for n, t in tensors.items() if t.is_floating_point() and not bool(torch.isfinite(t).all())]
    if broken:
        reason = f"{len(broken)} of {len(tensors)} tensors hold numbers that are not finite ({_some(broken)})"
        raise ConfigError(
            PATH_PLACE, path, reason, "The training that wrote it had diverged: use an earlier checkpoint"
        )


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
    """The model that `config` (or its keys as `settings`) describes, with its weights.

    The class is called with `model_config`, and with `action_dim`, `chunk` and `observation_space` if it names them and
    `model_config` does not. Weights no file gives are drawn from `seed`. `pretrained=False` leaves the file's weights
    out, for a checkpoint that brings all of them. What a person should know is appended to `notices`.
    """
    config = config or parse_section(VLAConfig, settings, place=PLACE)
    cls = _class_at(config.model_class)
    keywords = dict(config.settings)
    described = getattr(cls, "checkpoint_config", None)
    if described is not None and config.model_path is not None:
        keywords = {**described(config.model_path), **keywords}
    offered = {"action_dim": action_dim, "chunk": chunk, "observation_space": observation_space}
    wanted = _parameters_of(cls)
    keywords |= {k: v for k, v in offered.items() if k in wanted and k not in keywords and v is not None}
    model = _constructed(cls, config, keywords, seed)
    if config.model_path is not None and pretrained:
        _load_into(model, config, [] if notices is None else notices)
    return model


def _class_at(given: str) -> Any:
    module, _, name = given.partition(":") if ":" in given else given.rpartition(".")
    if not (module and name):
        remedy = "Write package.module:Class, or package.module.Class"
        raise ConfigError(f"{PLACE}.model_class", given, "names no class in a module", remedy)
    try:
        cls = import_address(f"{module}:{name}", place=f"{PLACE}.model_class")
    except ConfigError as error:
        remedy = "Check the address, and that the directory of the module is on PYTHONPATH"
        raise ConfigError(f"{PLACE}.model_class", given, error.reason, remedy) from error
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        reason = f"is not a subclass of torch.nn.Module but {_kind(cls)}"
        raise ConfigError(f"{PLACE}.model_class", given, reason, "Derive it from torch.nn.Module")
    return cls


def _kind(thing: Any) -> str:
    return f"the class {thing.__qualname__}" if isinstance(thing, type) else f"a {type(thing).__name__}"


def _constructed(cls: Any, config: VLAConfig, keywords: dict[str, Any], seed: int) -> nn.Module:
    # A model initialises itself from torch's global generator; it is put back as it was found.
    with _seeded_globally(seed):
        try:
            model: nn.Module = cls(**keywords)
        except ConfigError:
            raise
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError, ImportError, OSError) as error:
            known = sorted(_parameters_of(cls))
            raise ConfigError(
                f"{PLACE}.model_config", dict(config.settings),
                f"{config.model_class} refused it ({_in_one_line(error)})", f"It takes {', '.join(known) or 'nothing'}",
            ) from error  # fmt: skip
    return model


def _load_into(model: nn.Module, config: VLAConfig, notices: list[str]) -> None:
    assert config.model_path is not None
    tensors = read_weights(config.model_path)
    renamed = getattr(model, "checkpoint_weights", None)
    if renamed is not None:
        tensors = renamed(tensors)
    fresh = tuple(getattr(model, "fresh_weights", ()))
    report = fit_weights(model, tensors, path=config.model_path, strict=config.strict, fresh=fresh)
    if report.stripped:
        notices.append(f"{config.model_path}: every name begins with {report.stripped!r}, which was taken off.")
    if not report.fits:
        notices.append(f"{config.model_path}: {report.summary} (policy.vla_config.strict is false).")
