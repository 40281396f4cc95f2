"""The image processor of the reading model: a picture becomes the tokens of what the vision tower finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from palaestra.policy.screen_reader.detection import detect
from palaestra.policy.screen_reader.screen_tokens import ScreenTokenizer
from palaestra.policy.screen_reader.segments import SCREEN_FORMAT, SEGMENTS, SegmentTokenizer
from palaestra.policy.screen_reader.symbols import Floats, SymbolSequence, read_in_order
from palaestra.policy.screen_reader.tokenizer import load_tokenizer
from palaestra.policy.screen_reader.tower import Tower

WEIGHTS = "vision_tower.safetensors"
MAX_TOKENS = 1500
"""Further tokens of a screen are left out."""


def load_tower(path: Path) -> Tower:
    """The tower of a model directory."""
    tower = Tower()
    tower.load_state_dict({name: weight.float() for name, weight in load_file(path / WEIGHTS).items()})
    return tower.eval()


class PictureReader:
    """Reads pictures with a frozen tower; has the methods of transformers' image processors that the policy calls."""

    patch_size = merge_size = 1
    reads_pictures = True
    model_input_names = ("pixel_values", "image_grid_thw")

    def __init__(self, tower: Tower, tokenizer: Any) -> None:
        self.tower = tower.eval().requires_grad_(False)
        has_segments = tokenizer.init_kwargs.get(SCREEN_FORMAT) == SEGMENTS
        self.screen_tokenizer = SegmentTokenizer(tokenizer) if has_segments else ScreenTokenizer(tokenizer)

    @classmethod
    def from_pretrained(cls, path: str | Path, **_: Any) -> Self:
        """Load the tower and the tokenizer of a model directory."""
        return cls(load_tower(Path(path)), load_tokenizer(Path(path)))

    def save_pretrained(self, path: str | Path) -> None:
        """Write the tower into a model directory."""
        weights = {name: weight.half().contiguous() for name, weight in self.tower.state_dict().items()}
        save_file(weights, Path(path) / WEIGHTS)

    def read(self, image: Any) -> SymbolSequence:
        """The symbols on a PIL image, in reading order."""
        return read_in_order(detect(self.tower, np.asarray(image.convert("RGB"))))

    def __call__(self, *, images: list[Any], **_: Any) -> dict[str, torch.Tensor]:
        """Rows of the tokens of PIL images, one picture after the other."""
        rows = [torch.from_numpy(self._rows(image)) for image in images]
        return {"pixel_values": torch.cat(rows)}

    def _rows(self, image: Any) -> Floats:
        return self.screen_tokenizer.rows(self.read(image), image.size)[:MAX_TOKENS]
