"""The image processor of the reading model: a picture becomes the symbols that the vision tower finds on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from palaestra.policy.screen_reader.detection import detect
from palaestra.policy.screen_reader.symbols import BLANK, Floats, SymbolSequence, read_in_order, symbol_rows
from palaestra.policy.screen_reader.tower import Tower

WEIGHTS = "vision_tower.safetensors"
MAX_SYMBOLS = 1500
"""Further symbols of a screen are left out."""


class PictureReader:
    """Reads pictures with a frozen tower; has the methods of transformers' image processors that the policy calls."""

    patch_size = merge_size = 1
    reads_pictures = True
    model_input_names = ("pixel_values", "image_grid_thw")

    def __init__(self, tower: Tower) -> None:
        self.tower = tower.eval().requires_grad_(False)

    @classmethod
    def from_pretrained(cls, path: str | Path, **_: Any) -> Self:
        """Load the tower of a model directory."""
        tower = Tower()
        tower.load_state_dict({name: weight.float() for name, weight in load_file(Path(path) / WEIGHTS).items()})
        return cls(tower)

    def save_pretrained(self, path: str | Path) -> None:
        """Write the tower into a model directory."""
        weights = {name: weight.half().contiguous() for name, weight in self.tower.state_dict().items()}
        save_file(weights, Path(path) / WEIGHTS)

    def read(self, image: Any) -> SymbolSequence:
        """The symbols on a PIL image, in reading order."""
        return read_in_order(detect(self.tower, np.asarray(image.convert("RGB"))))

    def __call__(self, *, images: list[Any], **_: Any) -> dict[str, torch.Tensor]:
        """Rows of symbols of PIL images, one picture after the other."""
        rows = [torch.from_numpy(self._rows(image)) for image in images]
        return {"pixel_values": torch.cat(rows)}

    def _rows(self, image: Any) -> Floats:
        rows = symbol_rows(self.read(image), image.size)[:MAX_SYMBOLS]
        if len(rows):
            return rows
        # An empty screen is one symbol, so that a prompt always has a picture.
        blank = np.zeros((1, rows.shape[1]), np.float32)
        blank[0, 0] = BLANK
        return blank
