"""`Memory`: results that are costly to make, the least recently asked for forgotten first when there is no room."""

from __future__ import annotations

import hashlib
import io
import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

from torch import Tensor

from palaestra.errors import ConfigError, ExperienceError

__all__ = ["Memory", "Patches", "Picture", "PicturePreprocessor"]


V = TypeVar("V")


class Memory(Generic[V]):
    """A bounded store; safe to use from several threads."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes, self.used_bytes = capacity_bytes, 0
        self.hits = self.misses = 0
        self._held: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> V | None:
        """What is held under the key."""
        with self._lock:
            found = self._held.get(key)
            if found is None:
                self.misses += 1
                return None
            self.hits += 1
            self._held.move_to_end(key)
            return found[0]

    def put(self, key: Hashable, value: V, size_bytes: int) -> None:
        """Hold a value, if it fits at all."""
        with self._lock:
            if size_bytes > self.capacity_bytes or key in self._held:
                return
            self._held[key] = value, size_bytes
            self.used_bytes += size_bytes
            while self.used_bytes > self.capacity_bytes:
                _, (_, freed) = self._held.popitem(last=False)
                self.used_bytes -= freed

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._held.clear()
            self.used_bytes = 0


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


class PicturePreprocessor:
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
