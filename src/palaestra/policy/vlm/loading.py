"""A vision-language model with its tokenizer, chat template and picture preparation, from a directory or the hub.

Weights are read from safetensors only, and no code that comes with a model is run. Whatever is missing or of another
kind is one `ConfigError` before anything else happens: a model whose weights silently stayed random, or whose pictures
never reach it, trains badly and looks like a bad algorithm.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from palaestra.config import closest_names
from palaestra.errors import ConfigError
from palaestra.policy.device import choose_device
from palaestra.policy.vlm.config import ModelConfig

__all__ = ["Parts", "load_parts"]

PLACE = "model.name"
BUILT_IN = {"tiny": Path(__file__).parents[1] / "tiny_vlm" / "checkpoint"}
NEEDED = "Install 'palaestra[vlm]'"


@dataclass(frozen=True)
class Parts:
    """What the files of a model hold."""

    name: str
    model: Any
    """A transformers model for images and text to text, in eval mode."""
    tokenizer: Any
    image_processor: Any
    chat_template: str
    device: torch.device


def load_parts(config: ModelConfig) -> Parts:
    """Everything that `model.name` names, or `ConfigError` about the first thing that is not there."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(PLACE, config.name, f"needs a package that is not there ({error.name})", NEEDED) from None
    device = choose_device(config.device, place="model.device")
    source, options = _source(config.name), {"revision": config.revision, "trust_remote_code": False}
    known = _read(config, "config.json", transformers.AutoConfig, source, **options)
    _refuse_other_kinds(config, known)
    tokenizer = _read(config, "the tokenizer", transformers.AutoTokenizer, source, **options)
    template = _chat_template(config, source, tokenizer)
    # Asked for by name: where torchvision is installed its own resampling would be chosen, and the same screenshot
    # would be other numbers on another machine.
    images = _read(config, "the image processor", transformers.AutoImageProcessor, source, backend="pil", **options)
    _refuse_other_pictures(config, known, tokenizer, images)
    dtype = _dtype(config, device)
    extra = {} if config.attn_implementation is None else {"attn_implementation": config.attn_implementation}
    with _silent() if config.name in BUILT_IN else nullcontext():
        model, report = _read(
            config, "the weights", transformers.AutoModelForImageTextToText, source,
            use_safetensors=True, dtype=dtype, output_loading_info=True, **extra, **options,
        )  # fmt: skip
    _refuse_random_weights(config, report)
    return Parts(config.name, model.to(device).eval(), tokenizer, images, template, device)


@contextmanager
def _silent() -> Iterator[None]:
    """A bar for a moment's work would only disturb the display of whoever is waiting."""
    from transformers.utils import logging as bars

    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()  # type: ignore[no-untyped-call]


def _source(name: str) -> str:
    if name in BUILT_IN:
        place = BUILT_IN[name]
        if not (place / "config.json").is_file():
            raise ConfigError(
                PLACE, name, f"the built-in model is not in this installation ({place})",
                "Make one with 'palaestra tiny-vlm make' and name its directory",
            )  # fmt: skip
        return str(place)
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if path.is_file():
        raise ConfigError(PLACE, name, "is a file", "Name the directory it lies in")
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        there = sorted(entry.name for entry in path.parent.iterdir()) if path.parent.is_dir() else []
        close = closest_names(path.name, there)
        remedy = f"In {str(path.parent)!r} there is {', '.join(close)}" if close else "Check the path"
        raise ConfigError(PLACE, name, "no such directory", remedy)
    return name


def _read(config: ModelConfig, what: str, kind: Any, source: str, **options: Any) -> Any:
    """`kind.from_pretrained`, with the library's many errors turned into one of ours."""
    from safetensors import SafetensorError

    # It tells of every retry by itself; what came of them is in the one sentence below.
    retries = logging.getLogger("huggingface_hub.utils._http")
    before = retries.level
    retries.setLevel(logging.ERROR)
    try:
        return kind.from_pretrained(source, **options)
    except (OSError, ValueError, ImportError, SafetensorError, KeyError, RuntimeError) as error:
        said = _first_sentence(error)
        if "attn_implementation" in str(error) or "FlashAttention" in str(error):
            raise ConfigError(
                "model.attn_implementation", config.attn_implementation, said, "Leave it out, or use 'sdpa' or 'eager'"
            ) from None
        raise ConfigError(PLACE, config.name, f"{what} cannot be loaded ({said})", _remedy(source, said)) from None
    finally:
        retries.setLevel(before)


def _remedy(source: str, said: str) -> str:
    if Path(source).is_dir():
        names = sorted(entry.name for entry in Path(source).iterdir())
        return f"The directory holds {', '.join(names[:12]) or 'nothing'}"
    if "connect" in said or "offline" in said:
        return "Download the model where there is a network, and name its directory here"
    return "Check the spelling on the hub, and that you may read it; or name a directory"


def _first_sentence(error: Exception) -> str:
    said = " ".join(str(error).split()) or type(error).__name__
    return said.split(". ")[0].rstrip(".")[:200]


def _refuse_other_kinds(config: ModelConfig, known: Any) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as KINDS

    if known.model_type not in KINDS:
        raise ConfigError(
            PLACE, config.name, f"is a {known.model_type}, which does not turn pictures and text into text",
            "Use a vision-language model such as Qwen/Qwen2.5-VL-3B-Instruct",
        )  # fmt: skip
    if getattr(known, "image_token_id", None) is None:
        raise ConfigError(
            PLACE, config.name, f"a {known.model_type} has no token of its own that stands for a picture",
            "Use a model of the Qwen-VL family, or one built like it",
        )  # fmt: skip


def _chat_template(config: ModelConfig, source: str, tokenizer: Any) -> str:
    # The processor's template is the one that knows pictures; older directories keep a text-only one with the
    # tokenizer. The processor itself is not loaded: its video part needs torchvision.
    from transformers import ProcessorMixin

    held, _ = ProcessorMixin.get_processor_dict(source, revision=config.revision)
    template = held.get("chat_template") or getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise ConfigError(
            PLACE, config.name, "has no chat template, so nobody knows how it was taught to take turns",
            "Use the instruction-tuned variant of the model, or put its chat_template.jinja into the directory",
        )  # fmt: skip
    return str(template)


def _refuse_other_pictures(config: ModelConfig, known: Any, tokenizer: Any, images: Any) -> None:
    if known.image_token_id >= len(tokenizer):
        raise ConfigError(
            PLACE, config.name,
            f"its tokenizer has {len(tokenizer)} tokens and the picture's would be number {known.image_token_id}",
            "Download tokenizer.json and tokenizer_config.json as well",
        )  # fmt: skip
    if "image_grid_thw" not in images.model_input_names or not hasattr(images, "merge_size"):
        raise ConfigError(
            PLACE, config.name,
            f"pictures are prepared by {type(images).__name__}, which does not cut them into a grid of patches",
            "Use a model of the Qwen-VL family, or one that prepares pictures as they do",
        )  # fmt: skip


def _refuse_random_weights(config: ModelConfig, report: Any) -> None:
    missing, other = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    if missing or other:
        first = ", ".join(repr(name) for name in (missing or other)[:3])
        raise ConfigError(
            PLACE, config.name,
            f"{len(missing)} weights are missing from its files and {len(other)} have another shape ({first}, …)",
            "config.json and the weights belong to different models: download both again",
        )  # fmt: skip


def _dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        kind = getattr(torch, config.dtype)
        assert isinstance(kind, torch.dtype)
        return kind
    return torch.float32 if device.type == "cpu" or not config.use_lora else torch.bfloat16
