"""What the plain JSON in a Stable-Baselines3 zip says about its policy. No object in the zip is ever unpickled.

Imported by the run service and loaded by `policy_program.py` in other interpreters; imports nothing of ours. Python
3.8+.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from pathlib import Path
from typing import Any

MAX_DATA_BYTES = 64 << 20
POLICY_CLASSES = {
    "stable_baselines3.common.policies": ("ActorCriticPolicy", "ActorCriticCnnPolicy", "MultiInputActorCriticPolicy"),
    "stable_baselines3.dqn.policies": ("DQNPolicy", "CnnPolicy", "MultiInputPolicy"),
    "stable_baselines3.sac.policies": ("SACPolicy", "CnnPolicy", "MultiInputPolicy"),
    "stable_baselines3.td3.policies": ("TD3Policy", "CnnPolicy", "MultiInputPolicy"),
    "sb3_contrib.qrdqn.policies": ("QRDQNPolicy", "CnnPolicy", "MultiInputPolicy"),
    "sb3_contrib.tqc.policies": ("TQCPolicy", "CnnPolicy", "MultiInputPolicy"),
}
ACTIVATIONS = frozenset(
    "CELU ELU GELU Hardsigmoid Hardswish Hardtanh Identity LeakyReLU LogSigmoid Mish ReLU ReLU6 SELU SiLU Sigmoid "
    "Softplus Softsign Tanh Tanhshrink".split()
)
FEATURES_EXTRACTORS = ("FlattenExtractor", "NatureCNN", "CombinedExtractor")
FLAGS = frozenset(
    "ortho_init use_sde full_std use_expln squash_output share_features_extractor normalize_images".split()
)
NUMBERS = frozenset(("log_std_init", "clip_mean", "n_critics", "n_quantiles"))
EXTRACTOR_OPTIONS = frozenset(("features_dim", "cnn_output_dim", "normalized_image"))
UNUSED = frozenset(("optimizer_class", "optimizer_kwargs", ":type:", ":serialized:"))
"""Entries that a policy does not need to act."""


class Sb3Zip:
    """The description of a policy. `ValueError` if the file is no zip of Stable-Baselines3."""

    def __init__(self, path: str) -> None:
        try:
            with zipfile.ZipFile(path) as archive:
                if archive.getinfo("data").file_size > MAX_DATA_BYTES:
                    raise ValueError("its description is too large")
                data = json.loads(archive.read("data"))
        except (OSError, ValueError, KeyError, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
            raise ValueError(f"it is not a zip of Stable-Baselines3 ({error})") from None
        self.data: dict[str, Any] = data if isinstance(data, dict) else {}
        self.serialized: list[str] = []
        """What the policy needs that only the objects in the zip say; empty when the JSON is enough."""
        self.module, self.class_name = self._read_policy_class()
        self.kwargs = self._read_policy_kwargs()

    @property
    def has_objects(self) -> bool:
        """Whether the serialised objects are in the file; an import leaves them out."""
        entry = self.data.get("policy_class")
        return isinstance(entry, dict) and ":serialized:" in entry

    @property
    def is_normalized(self) -> bool:
        """Whether it was trained with VecNormalize: only then SB3 keeps the original observation."""
        return self.data.get("_last_original_obs") is not None

    @property
    def uses_sde(self) -> bool:
        """Whether it explores by state-dependent noise."""
        return self.data.get("use_sde") is True

    @property
    def exploration_rate(self) -> float:
        """How often DQN acts at random when it samples."""
        rate = self.data.get("exploration_rate")
        return float(rate) if rate is not None and _is_number(rate) else 0.0

    @property
    def algorithm(self) -> str:
        """The algorithm, as far as its settings tell it apart; else empty."""
        package = self.module.rpartition(".policies")[0].rpartition(".")[2]
        if package != "common":
            return package
        marks = {"clip_range": "ppo", "cg_max_steps": "trpo", "n_steps": "a2c"}
        return next((name for key, name in marks.items() if key in self.data), "")

    def _read_policy_class(self) -> tuple[str, str]:
        entry = self.data.get("policy_class")
        fields = entry if isinstance(entry, dict) else {}
        module = str(fields.get("__module__", ""))
        match = re.match(r"<function (\w+)\.__init__ at ", str(fields.get("__init__", "")))
        name = match.group(1) if match else ""
        if name not in POLICY_CLASSES.get(module, ()):
            self.serialized.append(f"a policy class of {module or 'an unknown module'}")
        return module, name

    def _read_policy_kwargs(self) -> dict[str, Any]:
        """Plain arguments of the policy; classes by their name alone."""
        entry = self.data.get("policy_kwargs")
        kwargs = {}
        for name, value in (entry if isinstance(entry, dict) else {}).items():
            if name in UNUSED:
                continue
            plain = _read_option(name, value)
            if plain is None and value is not None:
                self.serialized.append(f"policy_kwargs.{name} = {str(value)[:100]}")
            elif plain is not None:
                kwargs[name] = plain
        return kwargs


def find_statistics(path: Path) -> Path | None:
    """The pickle of VecNormalize beside a zip, under the names that SB3 and RL Zoo give it."""
    periodic = re.sub(r"_(\d+_steps)$", r"_vecnormalize_\1", path.stem)
    names = ("vecnormalize.pkl", "vec_normalize.pkl", f"{periodic}.pkl")
    return next((file for file in map(path.with_name, names) if file.is_file()), None)


def strip_objects(value: Any) -> Any:
    """JSON data of a zip without the serialised objects."""
    if isinstance(value, dict):
        return {key: strip_objects(item) for key, item in value.items() if key != ":serialized:"}
    return [strip_objects(item) for item in value] if isinstance(value, list) else value


def _read_option(name: str, value: Any) -> Any:
    """An argument of a policy if it is plain data or the name of a class that is known here; else None."""
    if name == "activation_fn":
        return _class_name(value, r"torch\.nn\.modules\.\w+", ACTIVATIONS)
    if name == "features_extractor_class":
        return _class_name(value, r"stable_baselines3\.common\.torch_layers", frozenset(FEATURES_EXTRACTORS))
    if name in FLAGS:
        is_plain = isinstance(value, bool)
    elif name in NUMBERS:
        is_plain = _is_number(value)
    elif name == "features_extractor_kwargs":
        is_plain = isinstance(value, dict) and all(
            key in EXTRACTOR_OPTIONS and (isinstance(option, bool) or _is_number(option))
            for key, option in value.items()
        )
    else:
        is_plain = name == "net_arch" and _is_network(value)
    return value if is_plain else None


def _class_name(text: Any, module: str, known: frozenset[str]) -> str | None:
    """The name in `<class 'module.Name'>`, the form in which SB3 stores a class in JSON, if it is a known one."""
    match = re.fullmatch(rf"<class '{module}\.(\w+)'>", text) if isinstance(text, str) else None
    return match.group(1) if match and match.group(1) in known else None


def _is_network(value: Any) -> bool:
    """Whether a value is a size, or lists and mappings of sizes."""
    if isinstance(value, (list, dict)):
        return all(_is_network(item) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
