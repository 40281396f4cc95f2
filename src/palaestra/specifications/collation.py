"""`collate_trajectories`: episodes as one batch of turns, for custom learning loops. Not used by `palaestra train`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from palaestra.experience.trajectory import Trajectory, Turn


def collate_trajectories(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """The N turns of B episodes as rows.

    images              the screen of each turn: uint8 `[N, H, W, 3]`, or a list if sizes differ
    actions             the action of each reply; None if unreadable
    rewards             float32 `[N]`, rewards of the environment
    prompts             the instruction of the turn's task
    generated_texts     the reply of the model
    token_ids           int64 `[N, G]` as sampled, and `log_probs` float32 `[N, G]`; 0 where `token_mask` is False
    prompt_ids          int64 `[N, P]`; padded at the start, with `prompt_mask`
    trajectory_lengths  int64 `[B]`: number of turns of each episode
    trajectory_indices  int64 `[N]`: index of the episode of each row
    """
    turns = [turn for one in trajectories for turn in one.turns]
    lengths = np.array([len(one) for one in trajectories], np.int64)
    token_ids, token_mask = _pad([turn.token_ids for turn in turns], np.int64)
    prompt_ids, prompt_mask = _pad([turn.prompt_ids for turn in turns], np.int64, at_start=True)
    return {
        "images": _stack([_picture(one, turn) for one in trajectories for turn in one.turns]),
        "actions": [None if turn.action is None else dict(turn.action) for turn in turns],
        "rewards": np.array([turn.reward for turn in turns], np.float32),
        "prompts": [str(one.task.get("instruction", "")) for one in trajectories for _ in one.turns],
        "generated_texts": [turn.text for turn in turns],
        "token_ids": token_ids,
        "token_mask": token_mask,
        "log_probs": _pad([turn.log_probs for turn in turns], np.float32)[0],
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "trajectory_lengths": lengths,
        "trajectory_indices": np.repeat(np.arange(len(lengths)), lengths),
    }


def _picture(trajectory: Trajectory, turn: Turn) -> NDArray[np.uint8]:
    from PIL import Image

    with Image.open(io.BytesIO(trajectory.pictures[turn.pictures[-1]])) as image:
        return np.array(image.convert("RGB"))


def _stack(images: list[NDArray[np.uint8]]) -> NDArray[np.uint8] | list[NDArray[np.uint8]]:
    if len({image.shape for image in images}) > 1:
        return images
    return np.stack(images) if images else np.zeros((0, 0, 0, 3), np.uint8)


def _pad(rows: list[NDArray[Any]], dtype: Any, *, at_start: bool = False) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """The rows padded with zeros to the longest, at the end or at the start, and their mask."""
    width = max((len(row) for row in rows), default=0)
    values, mask = np.zeros((len(rows), width), dtype), np.zeros((len(rows), width), np.bool_)
    for number, row in enumerate(rows):
        place = slice(width - len(row), width) if at_start else slice(0, len(row))
        values[number, place], mask[number, place] = row, True
    return values, mask
