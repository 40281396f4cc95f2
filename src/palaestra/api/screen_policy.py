"""Models that operate screens, as policies: `run.policy.predict(screenshot, instruction)`."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palaestra.actor.agent import Reply, VlmAgent
from palaestra.api.event_loop import call_outside_event_loop
from palaestra.errors import ConfigError
from palaestra.policy.vlm.sampler import LocalSampler, ReplyRequest, SampledReply
from palaestra.sessions.screen import Screenshot
from palaestra.sessions.task import TaskSpec
from palaestra.train.held_out import load_screen_policy

if TYPE_CHECKING:
    from PIL.Image import Image

    from palaestra.policy.vlm import VLMPolicy


class TrainedScreenPolicy:
    """A vision-language model that operates screens."""

    def __init__(self, module: VLMPolicy, *, temperature: float, threads: int) -> None:
        self.module = module
        self._temperature, self._sampler = temperature, LocalSampler(module, threads=threads)

    @classmethod
    def from_checkpoint(cls, path: Path, *, device: str | None = None) -> TrainedScreenPolicy:
        """The model of a checkpoint, on the device it was trained on unless another is given."""
        config, policy = load_screen_policy(path, device=device)
        return cls(policy, temperature=config.actor.temperature, threads=config.inference.torch_threads)

    def predict(
        self, screenshot: Image | bytes | str | Path, instruction: str, *, deterministic: bool = True, seed: int = 0
    ) -> Reply:
        """The model's reply to a screenshot: its `text` and the `action` it was read as.

        The action is None for a text without a readable action; `unreadable` has the reason.
        """
        if not isinstance(instruction, str):
            raise ConfigError("predict(instruction)", instruction, "is not text", "Give the task in words")
        screen = Screenshot.of(_read_picture(screenshot))
        temperature = 0.0 if deterministic else self._temperature

        async def sample(request: ReplyRequest) -> SampledReply:
            return self._sampler.sample([request], temperature=temperature)[0]

        agent = VlmAgent(sample, self.module.grammar, temperature=temperature)
        dialogue = agent.begin(TaskSpec("screen", "task", seed, {}, instruction, 1, screen.size), seed=seed)
        return call_outside_event_loop(lambda: asyncio.run(dialogue.reply(screen)))

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.module.trainable_parameters())
        return f"<TrainedScreenPolicy, {count:,} trained weights>"


def _read_picture(screenshot: Any) -> bytes:
    """The bytes of a PNG: of a Pillow image, of a file, or as given."""
    if isinstance(screenshot, bytes):
        return screenshot
    if isinstance(screenshot, str | Path):
        return Path(screenshot).read_bytes()
    if not hasattr(screenshot, "save"):
        remedy = "Give a Pillow image (Image.fromarray(array) of an array), PNG bytes or a path"
        raise ConfigError("predict(screenshot)", type(screenshot).__name__, "is not a picture", remedy)
    data = io.BytesIO()
    screenshot.convert("RGB").save(data, "PNG")
    return data.getvalue()
