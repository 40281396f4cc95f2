"""Images as a model takes them: resized once, to a size decided elsewhere, and cut into patches.

The image processor's own resizing is off. Resizing in two places is the usual reason why clicks miss their target.
"""

from __future__ import annotations

import hashlib
import io
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from palaestra.errors import ConfigError, ExperienceError

V = TypeVar("V")
PictureKey: TypeAlias = tuple[str, tuple[int, int]]
"""SHA-256 of a picture's bytes, and the size at which the model sees it."""


class LRUCache(Generic[V]):
    """A cache bounded in bytes that evicts the least recently used entry; safe to use from several threads."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes, self.used_bytes = capacity_bytes, 0
        self._entries: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> V | None:
        """The value of a key; None if it is not cached."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: Hashable, value: V, size_bytes: int) -> None:
        """Cache a value, unless it is larger than the whole cache."""
        with self._lock:
            if size_bytes > self.capacity_bytes or key in self._entries:
                return
            self._entries[key] = value, size_bytes
            self.used_bytes += size_bytes
            while self.used_bytes > self.capacity_bytes:
                _, (_, freed) = self._entries.popitem(last=False)
                self.used_bytes -= freed

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            self._entries.clear()
            self.used_bytes = 0


@dataclass(frozen=True)
class Picture:
    """A screenshot as it was taken, and the size at which the model sees it."""

    data: bytes = field(repr=False)
    """PNG or JPEG."""
    size: tuple[int, int]
    """Width and height for the model."""

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of `data`."""
        return hashlib.sha256(self.data).hexdigest()

    @property
    def key(self) -> PictureKey:
        """Cache key: pictures with the same key look the same to the model."""
        return self.sha256, self.size


class PicturePreprocessor:
    """Cuts pictures into patches, and caches the result."""

    def __init__(self, image_processor: Any, *, memory_bytes: int) -> None:
        self.image_processor = image_processor
        self.patch, self.merge = int(image_processor.patch_size), int(image_processor.merge_size)
        self.reads_pictures = bool(getattr(image_processor, "reads_pictures", False))
        self.cache: LRUCache[Tensor] = LRUCache(memory_bytes)

    @property
    def factor(self) -> int:
        """Widths and heights must be multiples of this."""
        return self.patch * self.merge

    def count_tokens(self, picture: Picture) -> int:
        """Number of prompt tokens of a picture: by its size, or by what is on it where the image processor reads it."""
        if self.reads_pictures:
            return len(self.patches(picture))
        width, height = self._check_size(picture.size)
        return (width // self.factor) * (height // self.factor)

    def grid(self, picture: Picture) -> tuple[int, int, int]:
        """Patches of a picture in time, down and across."""
        if self.reads_pictures:
            return 1, len(self.patches(picture)), 1
        width, height = picture.size
        return 1, height // self.patch, width // self.patch

    def _check_size(self, size: tuple[int, int]) -> tuple[int, int]:
        width, height = size
        if width <= 0 or height <= 0 or width % self.factor or height % self.factor:
            reason = f"is not made of whole blocks of {self.factor} pixels"
            raise ConfigError("picture size", f"{width}x{height}", reason, f"Decide sizes with factor {self.factor}")
        return size

    def patches(self, picture: Picture) -> Tensor:
        """Resize the picture and cut it into patches: [patches, channels x time x patch x patch]."""
        patches = self.cache.get(picture.key)
        if patches is None:
            patches = self._cut_patches(picture)
            self.cache.put(picture.key, patches, patches.nbytes)
        return patches

    def read_new(self, pictures: Iterable[Picture]) -> dict[PictureKey, npt.NDArray[np.float32]]:
        """Read the pictures that are not cached; returns what is on them, for `add_readings` in another process.

        Empty for image processors that do not read: their patches are cut faster than they are sent.
        """
        if not self.reads_pictures or not self.cache.capacity_bytes:
            return {}
        new = {picture.key: picture for picture in pictures if self.cache.get(picture.key) is None}
        return {key: self.patches(picture).numpy() for key, picture in new.items()}

    def add_readings(self, readings: Mapping[PictureKey, npt.NDArray[np.float32]]) -> None:
        """Cache what another process with the same image processor has read."""
        for key, reading in readings.items():
            patches = torch.from_numpy(reading)
            self.cache.put(key, patches, patches.nbytes)

    def resize(self, picture: Picture) -> Any:
        """The picture at the size at which the model sees it, as a PIL image."""
        from PIL import Image, UnidentifiedImageError

        self._check_size(picture.size)
        try:
            with Image.open(io.BytesIO(picture.data)) as file:
                image = file.convert("RGB")
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise ExperienceError(f"picture {picture.sha256[:12]} cannot be read ({error}).") from None
        return image if image.size == picture.size else image.resize(picture.size, Image.Resampling.BICUBIC)

    def _cut_patches(self, picture: Picture) -> Tensor:
        images = [self.resize(picture)]
        pixels: Tensor = self.image_processor(images=images, do_resize=False, return_tensors="pt")["pixel_values"]
        return pixels
