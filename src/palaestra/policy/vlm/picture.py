"""Pictures as a model takes them: resized once, here, to a size somebody else decided, and cut into patches.

The processor's own resizing stays off. Two places that resize are the usual reason why clicks land beside their
target.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from palaestra.errors import ConfigError, ExperienceError
from palaestra.policy.vlm.memory import Memory

__all__ = ["Patches", "Picture", "PictureShop"]


@dataclass(frozen=True)
class Picture:
    """A screenshot as it came from the screen, and the size at which the model sees it."""

    data: bytes = field(repr=False)
    """PNG or JPEG."""
    size: tuple[int, int]
    """Width and height for the model."""

    @cached_property
    def sha256(self) -> str:
        """Of the bytes as they came."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def key(self) -> tuple[str, tuple[int, int]]:
        """Pictures with the same key are the same to the model."""
        return self.sha256, self.size


@dataclass(frozen=True)
class Patches:
    """A picture as the vision tower's input."""

    pixels: Tensor
    """[patches, channels x time x patch x patch]."""
    grid: tuple[int, int, int]
    """Time, rows and columns of patches."""


class PictureShop:
    """Makes patches of pictures, and remembers them."""

    def __init__(self, image_processor: Any, *, memory_bytes: int) -> None:
        self.image_processor = image_processor
        self.patch, self.merge = int(image_processor.patch_size), int(image_processor.merge_size)
        self.memory: Memory[Patches] = Memory(memory_bytes)

    @property
    def factor(self) -> int:
        """Widths and heights are multiples of this."""
        return self.patch * self.merge

    def tokens(self, size: tuple[int, int]) -> int:
        """How many tokens a picture of this size takes in the prompt."""
        width, height = size
        if width <= 0 or height <= 0 or width % self.factor or height % self.factor:
            raise ConfigError(
                "picture size", f"{width}x{height}", f"is not made of whole blocks of {self.factor} pixels",
                f"Decide sizes with factor {self.factor}",
            )  # fmt: skip
        return (width // self.factor) * (height // self.factor)

    def patches(self, picture: Picture) -> Patches:
        """The picture, resized and cut up."""
        found = self.memory.get(picture.key)
        if found is None:
            found = self._cut(picture)
            self.memory.put(picture.key, found, found.pixels.nbytes)
        return found

    def _cut(self, picture: Picture) -> Patches:
        from PIL import Image, UnidentifiedImageError

        self.tokens(picture.size)
        try:
            with Image.open(io.BytesIO(picture.data)) as opened:
                image = opened.convert("RGB")
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise ExperienceError(f"picture {picture.sha256[:12]} cannot be read ({error}).") from None
        if image.size != picture.size:
            image = image.resize(picture.size, Image.Resampling.BICUBIC)
        made = self.image_processor(images=[image], do_resize=False, return_tensors="pt")
        time, rows, columns = (int(n) for n in made["image_grid_thw"][0])
        return Patches(made["pixel_values"], (time, rows, columns))
