"""Small trajectories to archive, score and look at; pictures are real PNG."""

import hashlib
import io

import numpy as np

from palaestra.experience.trajectory import Outcome, Trajectory, Turn

WIDTH, HEIGHT = 160, 120


def png(shade=200, width=WIDTH, height=HEIGHT, kind="PNG"):
    from PIL import Image

    pixels = np.full((height, width, 3), shade, np.uint8)
    pixels[20:50, 30:90] = (40, 110, 200)
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, kind)
    return written.getvalue()


SCREEN = png()
SHA = hashlib.sha256(SCREEN).hexdigest()


def turn(tokens=(5, 6), reward=0.0, **more):
    facts = {
        "pictures": (SHA,), "image_sizes": ((WIDTH, HEIGHT),), "prompt_ids": [1, 2, 2, 2, 3],
        "token_ids": list(tokens), "log_probs": [-0.5] * len(tokens), "versions": [4] * len(tokens), "text": "click",
        "reward": reward, "action": None if more.get("unreadable") else {"kind": "click", "at": [60, 35]},
    }  # fmt: skip
    return Turn(**(facts | more))


def episode(*turns, **more):
    facts = {
        "episode_id": "e1", "turns": turns or (turn(),), "outcome": Outcome.SUCCESS, "pictures": {SHA: SCREEN},
        "task": {
            "task": "click_target/one", "seed": 7, "params": {}, "instruction": "Click the blue box.",
            "step_limit": 10, "width": WIDTH, "height": HEIGHT,
        },
    }  # fmt: skip
    return Trajectory(**(facts | more))
