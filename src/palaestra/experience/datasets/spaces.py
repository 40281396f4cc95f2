"""The spaces of a dataset: which ones are supported, how Minari writes them as JSON, and the arrays that hold them.

Observations may be `Box`, `Discrete`, `MultiDiscrete`, `MultiBinary` or a `Dict` of those, nested or not; actions the
same without `Dict`. `Tuple`, `Text`, `Graph`, `Sequence` and `OneOf` are refused: no policy here acts on them. A `Dict`
is stored as one array per leaf, whose name is the keys joined by "/".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from palaestra.errors import DatasetError

Space: TypeAlias = gymnasium.Space[Any]
Array: TypeAlias = NDArray[Any]
Arrays: TypeAlias = Array | dict[str, Array]
"""One array, or for a `Dict` space one array per leaf."""

_MAX_NUMBERS = 2**27
"""Most numbers in one observation or action; a larger shape in a file is damage."""
_SUPPORTED = "Box, Discrete, MultiDiscrete, MultiBinary, and for observations a Dict of those"


class Leaf(NamedTuple):
    """One array of an observation or action."""

    name: str
    """Keys joined by "/"; empty if the space is no `Dict`."""
    space: Space
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """The type in memory: uint8 for images, float32 for other boxes, int64 for choices."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


def observation_leaves(space: Space, place: str = "observation_space") -> tuple[Leaf, ...]:
    """The arrays of an observation; `DatasetError` about `place` if the space is not supported."""
    leaves = tuple(_iterate_leaves(space, (), place))
    if not leaves:
        raise DatasetError(place, str(space), "it is empty", "Give the environment an observation")
    return leaves


def action_leaf(space: Space, place: str = "action_space") -> Leaf:
    """The array of an action; `DatasetError` about `place` if the space is not supported."""
    if isinstance(space, spaces.Dict):
        raise _unsupported_error(space, place)
    leaf = next(_iterate_leaves(space, (), place))
    return leaf._replace(dtype=np.dtype(np.int8)) if isinstance(space, spaces.MultiBinary) else leaf


def nest(space: Space) -> Space:
    """The space with keys such as "camera/rgb" as nested `Dict` spaces, which is how HDF5 stores them."""
    if not isinstance(space, spaces.Dict):
        return space
    nested: dict[str, Any] = {}
    for name, inner in space.spaces.items():
        *path, last = str(name).split("/")
        target = nested
        for key in path:
            target = target.setdefault(key, {})
            if not isinstance(target, dict):
                raise DatasetError("observation_space", str(space), f"{name!r} and {key!r} exclude each other")
        target[last] = nest(inner)
    return _to_dict_space(nested)


def _to_dict_space(nested: Mapping[str, Any]) -> spaces.Dict:
    return spaces.Dict({key: _to_dict_space(part) if isinstance(part, dict) else part for key, part in nested.items()})


def _iterate_leaves(space: Space, path: tuple[str, ...], place: str) -> Iterator[Leaf]:
    if isinstance(space, spaces.Dict):
        for key, inner in space.spaces.items():
            if not isinstance(key, str) or key in ("", ".") or "/" in key:
                reason = f"its key {key!r} cannot be the name of an array"
                raise DatasetError(place, str(space), reason, "Rename it: letters, digits and underscores")
            yield from _iterate_leaves(inner, (*path, key), place)
        return
    dtype = _memory_dtype(space)
    if dtype is None:
        raise _unsupported_error(space, f"{place}[{'/'.join(path)!r}]" if path else place)
    yield Leaf("/".join(path), space, tuple(space.shape or ()), dtype)


def _memory_dtype(space: Space) -> np.dtype[Any] | None:
    if isinstance(space, spaces.Box):
        return np.dtype(np.uint8 if space.dtype == np.uint8 else np.float32)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return np.dtype(np.int64)
    return np.dtype(np.float32) if isinstance(space, spaces.MultiBinary) else None


def _unsupported_error(space: object, place: str) -> DatasetError:
    name = space if isinstance(space, str) else type(space).__name__
    return DatasetError(place, str(space), f"{name} is not supported", f"Supported are {_SUPPORTED}")


def space_to_json(space: Space) -> dict[str, Any]:
    """A supported space as Minari writes it. A space is text in Minari's metadata: dump the result once more."""
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "subspaces": {key: space_to_json(inner) for key, inner in space.spaces.items()}}
    if isinstance(space, spaces.Box):
        bounds = {"low": space.low.tolist(), "high": space.high.tolist()}
        return {"type": "Box", "dtype": str(space.dtype), "shape": list(space.shape), **bounds}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "dtype": "int64", "start": int(space.start), "n": int(space.n)}
    if isinstance(space, spaces.MultiDiscrete):
        choices = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
        return {"type": "MultiDiscrete", "dtype": str(space.dtype), **choices}
    if isinstance(space, spaces.MultiBinary):
        shape = space.n if isinstance(space.n, int) else list(space.shape)
        return {"type": "MultiBinary", "n": shape}
    raise _unsupported_error(space, "space")


def space_from_json(text: object, place: str) -> Space:
    """The space that Minari wrote; `DatasetError` about `place` if it is unknown or damaged."""
    try:
        return _read_space(json.loads(text) if isinstance(text, str) else text, place)
    except (KeyError, TypeError, ValueError, AssertionError, OverflowError, RecursionError) as error:
        reason = f"is not a space ({type(error).__name__}: {error})"
        raise DatasetError(place, text, reason, "Create or download the dataset again") from None


def _read_space(document: Any, place: str) -> Space:
    kind = document["type"]
    if kind == "Dict":
        inner = document["subspaces"].items()
        return spaces.Dict({key: _read_space(part, f"{place}[{key!r}]") for key, part in inner})
    if kind == "Box":
        dtype, shape = np.dtype(str(document["dtype"])), tuple(int(size) for size in document["shape"])
        if dtype.kind not in "fiu":
            raise ValueError(f"a Box of {dtype} is not supported")
        if any(size < 1 for size in shape) or math.prod(shape) > _MAX_NUMBERS:
            raise ValueError(f"shape {list(shape)} is impossible")
        low, high = (np.array(document[bound], dtype) for bound in ("low", "high"))
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(int(document["n"]), start=int(document.get("start", 0)))
    if kind == "MultiDiscrete":
        start = document.get("start")
        return spaces.MultiDiscrete(document["nvec"], np.dtype(str(document.get("dtype", "int64"))).type, start=start)
    if kind == "MultiBinary":
        return spaces.MultiBinary(document["n"])
    raise _unsupported_error(str(kind), place)
