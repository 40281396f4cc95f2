"""Episodes in the HDF5 layout of Minari: one group per episode, one contiguous array per quantity.

    episode_0/  attributes id, seed, total_steps
        observations      [T + 1, ...], or a group with one array per leaf of a Dict
        actions  rewards  terminations  truncations      [T, ...]

h5py's high-level classes take about 0.2 ms per array, which is a minute for the 250,000 arrays of a million steps of
CartPole. Episodes are therefore written through its low-level functions, and an index of their places in the file lets
a reader copy them without asking HDF5 at all. Files of others, which have no index, are read through HDF5.
"""

from __future__ import annotations

import errno
import io
import math
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from palaestra.errors import ConfigError, DatasetError
from palaestra.experience.datasets.episodes import SCALARS, ArrayLayout, Episode, TransitionArrays
from palaestra.experience.datasets.spaces import Array, Leaf
from palaestra.processes.memory import check_fits_in_memory, format_bytes, memory_limit

METADATA, MAIN = "metadata.json", "main_data.hdf5"
_AGAIN = "Create, import or download it again"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MIN_IMAGE = 32
_ALWAYS_FITS = 2**24
"""Arrays up to this many bytes are read without asking for the limit of memory, which takes longer than reading."""


def import_h5py() -> ModuleType:
    """The module h5py; `ConfigError` with the command that installs it."""
    try:
        import h5py
    except ImportError:
        raise ConfigError("h5py", None, "is not installed", "pip install 'palaestra[offline]'") from None
    module: ModuleType = h5py
    return module


@contextmanager
def open_hdf5(path: Path, place: str = "dataset") -> Iterator[Any]:
    """Open an HDF5 file for reading; `DatasetError` about `place` if it is none."""
    h5py = import_h5py()
    try:
        file = h5py.File(path, "r", locking=False)
    except OSError as error:
        reason = f"{path.name} is not an HDF5 file that can be read ({_first_line(error)})"
        raise DatasetError(place, str(path), reason, "Check the path, or " + _AGAIN.lower()) from None
    with file:
        yield file


@contextmanager
def _hold_interrupts() -> Iterator[None]:
    """Deliver signals after the block. HDF5 calls Python to write, and swallows exceptions that are raised there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[int, Any]] = []
    # Other handlers raise nothing: the default one, and those outside Python.
    raising = [number for number in _SIGNALS if callable(signal.getsignal(number))]
    previous: dict[int, Any] = {
        number: signal.signal(number, lambda number, frame: held.append((number, frame))) for number in raising
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if held:
        previous[held[0][0]](*held[0])


class _GuardedFile(io.FileIO):
    """A file for HDF5 that remembers its first error instead of raising it, and ignores later writes.

    HDF5 cannot close a file after a failed write: h5py prints a traceback per open object, and the process may crash.
    """

    error: OSError | None = None

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if self.error is None:
            try:
                written = super().write(data)
                if written != size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.name))
            except OSError as error:
                self.error = error
        if self.error is not None:
            self.seek(size, os.SEEK_CUR)
        return size

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size)
        except OSError as error:
            self.error = self.error or error
            return size or 0

    def raise_if_failed(self) -> None:
        if self.error is not None:
            raise self.error


class EpisodeFile:
    """Appends episodes to a new HDF5 file, and knows where each of their arrays begins in it."""

    def __init__(self, path: Path, layout: ArrayLayout) -> None:
        self._h5py, self._layout = import_h5py(), layout
        self._disk = _GuardedFile(path, "w+")
        self._file = self._h5py.File(self._disk, "w")
        self._names = layout.names()
        self._rows: list[list[int]] = []
        self.num_steps = 0
        self._kinds: dict[np.dtype[Any], Any] = {}
        h5p = self._h5py.h5p
        self._link_creation = h5p.create(h5p.LINK_CREATE)
        self._link_creation.set_create_intermediate_group(True)
        self._creation = h5p.create(h5p.DATASET_CREATE)
        # Times in the file would give the same data another digest.
        self._creation.set_obj_track_times(False)

    @property
    def num_episodes(self) -> int:
        """Number of episodes written."""
        return len(self._rows)

    def add(self, episode: Episode) -> None:
        """Append an episode; `DatasetError` if its arrays do not fit the spaces."""
        arrays = self._layout.check(episode, f"episode {len(self._rows)}")
        with _hold_interrupts():
            self._append(episode, arrays)
        self._disk.raise_if_failed()

    def _append(self, episode: Episode, arrays: list[Array]) -> None:
        h5s, h5d, h5t = self._h5py.h5s, self._h5py.h5d, self._h5py.h5t
        number = len(self._rows)
        group = self._h5py.h5g.create(self._file.id, f"episode_{number}".encode())
        self._write_attribute(group, b"id", number)
        if episode.seed is not None:
            self._write_attribute(group, b"seed", episode.seed)
        self._write_attribute(group, b"total_steps", len(episode))
        row = [len(episode)]
        for name, array in zip(self._names, arrays, strict=True):
            kind = self._kinds.get(array.dtype)
            if kind is None:
                kind = self._kinds[array.dtype] = h5t.py_create(array.dtype, logical=True)
            shape = h5s.create_simple(array.shape)
            dataset = h5d.create(group, name.encode(), kind, shape, self._creation, self._link_creation)
            dataset.write(h5s.ALL, h5s.ALL, array)
            row.append(dataset.get_offset())
        self._rows.append(row)
        self.num_steps += len(episode)

    def close(self) -> None:
        """Close the file; `OSError` if it could not be written."""
        if not self._disk.closed:
            with _hold_interrupts():
                self._file.close()
                self._disk.close()
            self._disk.raise_if_failed()

    def index(self) -> bytes:
        """The index as an `.npy` file: per episode its length and the offset of every array."""
        buffer = io.BytesIO()
        np.save(buffer, np.array(self._rows, np.int64).reshape(len(self._rows), 1 + len(self._names)))
        return buffer.getvalue()

    def _write_attribute(self, group: Any, name: bytes, value: int) -> None:
        h5s, h5t = self._h5py.h5s, self._h5py.h5t
        number = np.array(value, np.int64)
        self._h5py.h5a.create(group, name, h5t.py_create(number.dtype), h5s.create(h5s.SCALAR)).write(number)


class _Buffers:
    """The arrays of all transitions while they are filled."""

    def __init__(self, layout: ArrayLayout, num_steps: int) -> None:
        self._layout = layout
        self.now = {leaf.name: np.empty((num_steps, *leaf.shape), leaf.dtype) for leaf in layout.observations}
        self.next = {name: np.empty_like(array) for name, array in self.now.items()}
        self.rest: list[Array] = [np.empty((num_steps, *layout.action.shape), layout.action.dtype)]
        self.rest += [np.empty(num_steps, dtype) for dtype in SCALARS.values()]

    def put(self, start: int, arrays: Sequence[Array]) -> int:
        """Copy the arrays of one episode, in the order of `ArrayLayout.names`; returns the next start."""
        count = len(self._layout.observations)
        end = start + len(arrays[-1])
        for leaf, rows in zip(self._layout.observations, arrays[:count], strict=True):
            self.now[leaf.name][start:end] = rows[:-1]
            self.next[leaf.name][start:end] = rows[1:]
        for target, rows in zip(self.rest, arrays[count:], strict=True):
            target[start:end] = rows
        # A collector may stop within an episode without saying so; its last step still ends it.
        terminated, truncated = self.rest[-2:]
        truncated[end - 1] |= not terminated[end - 1]
        return end

    def finish(self) -> TransitionArrays:
        action, reward, terminated, truncated = self.rest
        now, after = (self.now, self.next) if self._layout.is_dict else (self.now[""], self.next[""])
        return TransitionArrays(now, action, reward, after, terminated, truncated)


def check_memory(layout: ArrayLayout, num_steps: int, dataset_id: str) -> None:
    """Raise `ConfigError` if the transitions of a dataset do not fit into memory."""
    observations = sum(leaf.row_bytes for leaf in layout.observations) * num_steps
    parts = {"observations": observations, "next observations": observations}
    parts["actions and rewards"] = (layout.action.row_bytes + 6) * num_steps
    check_fits_in_memory("dataset", dataset_id, parts, "Use a smaller dataset, or a machine with more memory")


def read_with_index(path: Path, index: Path, layout: ArrayLayout, num_steps: int) -> TransitionArrays:
    """Copy all transitions from a file whose index says where they are."""
    rows = np.load(index, allow_pickle=False)
    names = layout.names()
    if rows.ndim != 2 or rows.shape[1] != 1 + len(names) or rows.dtype != np.int64 or rows[:, 0].sum() != num_steps:
        raise DatasetError("dataset", str(index), "does not fit the metadata of the dataset", _AGAIN)
    leaves: list[tuple[tuple[int, ...], np.dtype[Any], int]]
    leaves = [(leaf.shape, leaf.dtype, 1) for leaf in layout.observations]
    leaves += [(layout.action.shape, layout.action.dtype, 0)]
    leaves += [((), np.dtype(dtype), 0) for dtype in SCALARS.values()]
    buffers, start = _Buffers(layout, num_steps), 0
    file = np.memmap(path, np.uint8, "r")
    try:
        for length, *offsets in rows.tolist():
            arrays = [
                np.ndarray((length + more, *shape), dtype, file, offset)
                for (shape, dtype, more), offset in zip(leaves, offsets, strict=True)
            ]
            start = buffers.put(start, arrays)
    except (TypeError, ValueError) as error:  # beyond the end of the file
        raise DatasetError("dataset", str(index), f"points outside {path.name} ({error})", _AGAIN) from None
    return buffers.finish()


def read_episodes(path: Path, layout: ArrayLayout, num_episodes: int, num_steps: int) -> TransitionArrays:
    """Read all transitions of a file of Minari; `DatasetError` if it does not fit its metadata."""
    buffers, start = _Buffers(layout, num_steps), 0
    with open_hdf5(path) as file:
        for number in range(num_episodes):
            arrays = layout.check(read_episode(file, layout, number), f"episode {number}")
            if start + len(arrays[-1]) > num_steps:
                break
            start = buffers.put(start, arrays)
        else:
            number = num_episodes
    if start != num_steps or number != num_episodes:
        reason = f"its episodes hold other numbers of steps than the {num_steps:,} of its metadata"
        raise DatasetError("dataset", str(path), reason, _AGAIN)
    return buffers.finish()


def read_episode(file: Any, layout: ArrayLayout, number: int) -> Episode:
    """One episode of an open file; `DatasetError` if it is incomplete, or if an array refers to another file."""
    group = f"episode_{number}"
    observations = {
        leaf.name: read_array(file, f"{group}/observations/{leaf.name}".rstrip("/"), leaf)
        for leaf in layout.observations
    }
    actions, rewards, terminated, truncated = (read_array(file, f"{group}/{name}") for name in ("actions", *SCALARS))
    return Episode(observations, actions, rewards, terminated, truncated)


def read_array(file: Any, name: str, leaf: Leaf | None = None) -> Array:
    """An array of an HDF5 file that lies in this file and holds plain numbers; otherwise `DatasetError`."""
    dataset = _find_array(file, name)
    shape, dtype = dataset.shape, dataset.dtype
    if leaf is not None and _is_jpeg(shape, leaf):
        raise DatasetError(name, str(dtype), "holds JPEG pictures, which are lossy", "Use an uncompressed dataset")
    if dtype.kind not in "biuf":
        raise DatasetError(name, str(dtype), "is not an array of numbers", "Convert it to numbers")
    size = math.prod(shape) * dtype.itemsize
    if size > _ALWAYS_FITS and size > memory_limit():
        reason = f"has {format_bytes(size)}, more than the memory of this machine"
        raise DatasetError(name, list(shape), reason, "Use a smaller file, or a machine with more memory")
    h5s = import_h5py().h5s
    try:
        array: Array = np.empty(shape, dtype)
        if size:
            dataset.read(h5s.ALL, h5s.ALL, array)
    except (OSError, ValueError, MemoryError) as error:
        raise DatasetError(name, _file_name(file), f"cannot be read ({_first_line(error)})", _AGAIN) from None
    return array


def _find_array(file: Any, name: str) -> Any:
    """The low-level HDF5 dataset. Links and layouts that lead to other files are refused before they are followed."""
    h5py = import_h5py()
    complete = "Check that it is a complete dataset"
    try:
        place, parts = file.id, name.split("/")
        for number, part in enumerate(parts, 1):
            links, key = place.links, part.encode()
            path = "/".join(parts[:number])
            if not links.exists(key):
                raise DatasetError(name, _file_name(file), f"has no {path}", complete)
            if links.get_info(key).type != h5py.h5l.TYPE_HARD:
                remedy = "Copy the data into one file: h5repack"
                raise DatasetError(name, _file_name(file), f"{path} is a link", remedy)
            place = h5py.h5o.open(place, key)
            is_group = isinstance(place, h5py.h5g.GroupID)
            if is_group == (number == len(parts)):
                kind = "a group, not an array" if is_group else "not a group"
                raise DatasetError(name, _file_name(file), f"{path} is {kind}", complete)
    except (KeyError, OSError, RuntimeError) as error:
        raise DatasetError(name, _file_name(file), f"cannot be read ({_first_line(error)})", _AGAIN) from None
    if not isinstance(place, h5py.h5d.DatasetID):
        raise DatasetError(name, _file_name(file), "is not an array", complete)
    properties = place.get_create_plist()
    if properties.get_layout() == h5py.h5d.VIRTUAL or properties.get_external_count():
        reason = "its data lies in other files"
        raise DatasetError(name, _file_name(file), reason, "Copy the data into one file: h5repack")
    return place


def _file_name(file: Any) -> str:
    return str(file.filename)


def has_link(group: Any, name: str) -> bool:
    """Whether a group has an entry. `name in group` would follow a link into another file."""
    return bool(group.id.links.exists(name.encode()))


def _is_jpeg(shape: tuple[int, ...], leaf: Leaf) -> bool:
    is_image = leaf.dtype == np.uint8 and len(leaf.shape) in (2, 3) and min(leaf.shape[:2]) >= _MIN_IMAGE
    return is_image and shape[1:] != leaf.shape


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
