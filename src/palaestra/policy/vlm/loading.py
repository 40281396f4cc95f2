"""Load a vision-language model with its tokenizer, chat template and image processor, from a directory or the hub.

Weights are read from safetensors only, and no code that comes with a model is run. Missing or unsuitable files raise
`ConfigError` before training starts: a model with random weights, or one that never receives its images, would train
badly and look like a bad algorithm.
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
from palaestra.policy.device import choose_device, has_bfloat16_instructions
from palaestra.policy.vlm.config import ModelConfig

_log = logging.getLogger(__name__)

PLACE = "model.name"
BUILT_IN = {
    "tiny": Path(__file__).parents[1] / "tiny_vlm" / "checkpoint",
    "tiny-reader": Path(__file__).parents[1] / "screen_reader" / "checkpoint",
}
"""Models that come with the package. They know their action grammar."""


@dataclass(frozen=True)
class LoadedModel:
    """A pretrained model and everything that belongs to it."""

    name: str
    model: Any
    """A transformers model for images and text to text, in eval mode."""
    tokenizer: Any
    image_processor: Any
    chat_template: str
    device: torch.device


def load_model(config: ModelConfig) -> LoadedModel:
    """Load the model that `model.name` names; `ConfigError` if anything is missing or unsuitable."""
    try:
        import transformers
    except ImportError as error:
        reason = f"needs a package that is not there ({error.name})"
        raise ConfigError(PLACE, config.name, reason, "Install 'palaestra[vlm]'") from None
    from palaestra.policy.screen_reader.image_processor import PictureReader
    from palaestra.policy.screen_reader.modeling import MODEL_TYPE, register_model

    register_model()
    device = choose_device(config.device, place="model.device")
    source, options = _find_source(config.name), {"revision": config.revision, "trust_remote_code": False}
    settings = _load(config, "config.json", transformers.AutoConfig, source, **options)
    _check_model_type(config, settings)
    tokenizer = _load(config, "the tokenizer", transformers.AutoTokenizer, source, **options)
    template = _chat_template(config, source, tokenizer)
    if settings.model_type == MODEL_TYPE:
        images = _load(config, "the vision tower", PictureReader, source)
    else:
        # The PIL backend everywhere: torchvision resamples differently, and a screenshot would give other numbers.
        images = _load(config, "the image processor", transformers.AutoImageProcessor, source, backend="pil", **options)
    _check_image_processor(config, settings, tokenizer, images)
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    with hide_progress_bar() if config.name in BUILT_IN else nullcontext():
        model, report = _load(
            config,
            "the weights",
            transformers.AutoModelForImageTextToText,
            source,
            use_safetensors=True,
            dtype=_dtype(config, device),
            output_loading_info=True,
            **options,
        )
    _check_all_weights_loaded(config, report)
    return LoadedModel(config.name, model.to(device).eval(), tokenizer, images, template, device)


@contextmanager
def hide_progress_bar() -> Iterator[None]:
    """Let transformers show no progress bars."""
    from transformers.utils import logging as bars

    enabled = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if enabled:
            bars.enable_progress_bar()  # type: ignore[no-untyped-call]


def _find_source(name: str) -> str:
    """A directory, or the name of a model on the hub."""
    if name in BUILT_IN:
        place = BUILT_IN[name]
        if not (place / "config.json").is_file():
            reason = f"the built-in model is not in this installation ({place})"
            remedy = f"Make one with 'palaestra tiny-vlm make --model {name}' and name its directory"
            raise ConfigError(PLACE, name, reason, remedy)
        return str(place)
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if path.is_file():
        raise ConfigError(PLACE, name, "is a file", "Name the directory it lies in")
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        names = sorted(entry.name for entry in path.parent.iterdir()) if path.parent.is_dir() else []
        close = closest_names(path.name, names)
        remedy = f"In {str(path.parent)!r} there is {', '.join(close)}" if close else "Check the path"
        raise ConfigError(PLACE, name, "no such directory", remedy)
    return name


def _load(config: ModelConfig, part: str, cls: Any, source: str, **options: Any) -> Any:
    """Call `cls.from_pretrained` and turn the library's errors into `ConfigError`."""
    from safetensors import SafetensorError

    # The hub client logs every retry; the error below reports the outcome.
    retries = logging.getLogger("huggingface_hub.utils._http")
    level = retries.level
    retries.setLevel(logging.ERROR)
    try:
        return cls.from_pretrained(source, **options)
    except (OSError, ValueError, ImportError, SafetensorError, KeyError, RuntimeError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        message = message.split(". ")[0].rstrip(".")[:200]
        if "attn_implementation" in str(error) or "FlashAttention" in str(error):
            remedy = "Leave it out, or use 'sdpa' or 'eager'"
            raise ConfigError("model.attn_implementation", config.attn_implementation, message, remedy) from None
        reason = f"{part} cannot be loaded ({message})"
        raise ConfigError(PLACE, config.name, reason, _remedy(source, message)) from None
    finally:
        retries.setLevel(level)


def _remedy(source: str, message: str) -> str:
    if Path(source).is_dir():
        names = sorted(entry.name for entry in Path(source).iterdir())
        return f"The directory holds {', '.join(names[:12]) or 'nothing'}"
    if "connect" in message or "offline" in message:
        return "Download the model where there is a network, and name its directory here"
    return "Check the spelling on the hub, and that you may read it; or name a directory"


def _check_model_type(config: ModelConfig, settings: Any) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    from palaestra.policy.screen_reader.modeling import MODEL_TYPE

    kind = settings.model_type
    if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and kind != MODEL_TYPE:
        reason = f"is a {kind}, which does not turn pictures and text into text"
        remedy = "Use a vision-language model such as Qwen/Qwen2.5-VL-3B-Instruct"
        raise ConfigError(PLACE, config.name, reason, remedy)
    if getattr(settings, "image_token_id", None) is None:
        reason = f"a {kind} has no separate token for a picture"
        raise ConfigError(PLACE, config.name, reason, "Use a model of the Qwen-VL family, or one built like it")


def _chat_template(config: ModelConfig, source: str, tokenizer: Any) -> str:
    # The processor's template knows pictures; older directories keep a text-only one with the tokenizer. The
    # processor itself is not loaded: its video part needs torchvision.
    from transformers import ProcessorMixin

    settings, _ = ProcessorMixin.get_processor_dict(source, revision=config.revision)
    template = settings.get("chat_template") or getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        reason = "has no chat template, so the format of a conversation is unknown"
        remedy = "Use the instruction-tuned variant of the model, or put its chat_template.jinja into the directory"
        raise ConfigError(PLACE, config.name, reason, remedy)
    return str(template)


def _check_image_processor(config: ModelConfig, settings: Any, tokenizer: Any, images: Any) -> None:
    if settings.image_token_id >= len(tokenizer):
        size, image_token = len(tokenizer), settings.image_token_id
        reason = f"its tokenizer has {size} tokens and the picture's would be number {image_token}"
        remedy = "Download tokenizer.json and tokenizer_config.json as well"
        raise ConfigError(PLACE, config.name, reason, remedy)
    if "image_grid_thw" not in images.model_input_names or not hasattr(images, "merge_size"):
        reason = f"pictures are prepared by {type(images).__name__}, which does not cut them into a grid of patches"
        remedy = "Use a model of the Qwen-VL family, or one that prepares pictures as they do"
        raise ConfigError(PLACE, config.name, reason, remedy)


def _check_all_weights_loaded(config: ModelConfig, report: Any) -> None:
    missing, mismatched = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    if missing or mismatched:
        first = ", ".join(repr(name) for name in (missing or mismatched)[:3])
        counts = f"{len(missing)} weights are missing from its files and {len(mismatched)} have another shape"
        remedy = "config.json and the weights belong to different models: download both again"
        raise ConfigError(PLACE, config.name, f"{counts} ({first}, …)", remedy)


def _dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        dtype = getattr(torch, config.dtype)
        assert isinstance(dtype, torch.dtype)
        if dtype == torch.bfloat16 and device.type == "cpu" and not has_bfloat16_instructions():
            _log.warning(
                "model.dtype = 'bfloat16': this processor has no instructions for it, and emulating it is several "
                "times slower than float32. Use model.dtype=auto"
            )
        return dtype
    return torch.float32 if device.type == "cpu" or not config.use_lora else torch.bfloat16
