"""Trains one algorithm of Stable-Baselines3 and says what happens as marked lines on stdout.

Run by path with an interpreter that has stable_baselines3; imports nothing of ours. Goes on from a checkpoint, or
begins with the weights of one, without unpickling anything in it: parameters are read as weights, counters as JSON.
SIGTERM saves and leaves.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import os
import signal
import sys
import zipfile
from types import FrameType
from typing import Any

COUNTERS = ("num_timesteps", "_n_updates", "_episode_num")


def say(kind: str, **fields: Any) -> None:
    """One event."""
    sys.stdout.write("@palaestra " + json.dumps({"kind": kind, **fields}) + "\n")
    sys.stdout.flush()


def plain(value: float) -> Any:
    """JSON has no word for what is not finite."""
    value = float(value)
    return value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


class Training:
    """One run."""

    def __init__(self, wanted: argparse.Namespace) -> None:
        self.wanted = wanted
        self.settings: dict[str, Any] = json.loads(wanted.config)
        self.stopped = False
        self.episodes = 0
        self.saved = -1
        self.model = self._model()

    def run(self) -> int:
        """From the first word to the exit code."""
        signal.signal(signal.SIGTERM, self._term)
        signal.signal(signal.SIGINT, self._term)
        model = self.model
        begun = self._begin()
        logger = importlib.import_module("stable_baselines3.common.logger")
        # A bound method as a class attribute stays bound to this run: the writer needs no state of its own.
        lines = type("Lines", (logger.KVWriter,), {"write": self._write, "close": lambda _: None})
        model.set_logger(logger.Logger(folder=None, output_formats=[lines()]))
        say("PhaseChanged", phase="running", reason="resumed" if begun else "started")
        interval = self.settings.get("log_interval")
        model.learn(
            max(0, self.wanted.total_timesteps - begun), callback=self._step, reset_num_timesteps=not begun,
            **({} if interval is None else {"log_interval": interval}),
        )  # fmt: skip
        self._save()
        model.get_env().close()
        say(
            "PhaseChanged", phase="stopped" if self.stopped else "succeeded", reason="asked" if self.stopped else "done"
        )
        return 130 if self.stopped else 0

    def _model(self) -> Any:
        """Algorithm and environments as the settings say."""
        module, _, name = self.wanted.algorithm.partition(":")
        util = importlib.import_module("stable_baselines3.common.env_util")
        named = dict(self.settings.get("env_kwargs") or {})
        if self.wanted.video:
            named["render_mode"] = "rgb_array"
        env = util.make_vec_env(
            self.wanted.env, n_envs=self.settings.get("num_envs") or 1, seed=self.wanted.seed, env_kwargs=named
        )
        if self.wanted.video:
            vec_env = importlib.import_module("stable_baselines3.common.vec_env")
            often = 10_000
            env = vec_env.VecVideoRecorder(env, "videos", lambda step: step % often == 0, video_length=200)
        algorithm = getattr(importlib.import_module(module), name)
        return algorithm(
            self.settings.get("policy") or "MlpPolicy", env, seed=self.wanted.seed, device=self.wanted.device,
            **self.settings.get("algorithm", {}),
        )  # fmt: skip

    def _begin(self) -> int:
        """Take weights, and when it is a resume counters, from a checkpoint; the steps already taken."""
        path = self.wanted.resume or self.wanted.load
        if not path:
            return 0
        self.model.set_parameters(path, device=self.wanted.device)
        if not self.wanted.resume:
            return 0
        with zipfile.ZipFile(path) as archive:
            told = json.loads(archive.read("data"))
        for name in COUNTERS:
            if isinstance(told.get(name), int):
                setattr(self.model, name, told[name])
        self.saved = self.model.num_timesteps
        return int(self.model.num_timesteps)

    def _term(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True

    def _write(self, key_values: dict[str, Any], key_excluded: dict[str, Any], step: int = 0) -> None:
        metrics = {key: plain(value) for key, value in key_values.items() if hasattr(value, "__float__")}
        update = int(getattr(self.model, "_n_updates", 0))
        say("TrainingStep", update=update, env_step=int(step), metrics=metrics)

    def _step(self, local: dict[str, Any], _: dict[str, Any]) -> bool:
        now = int(self.model.num_timesteps)
        for index, info in enumerate(local.get("infos", ())):
            if "episode" in info:
                self.episodes += 1
                told = info["episode"]
                say(
                    "EpisodeSummary", env_step=now, episode=self.episodes, env_index=index,
                    episode_return=plain(told["r"]), length=int(told["l"]),
                )  # fmt: skip
        every = self.settings.get("checkpoint_every")
        if every and now - max(self.saved, 0) >= every:
            self._save()
        return not self.stopped

    def _save(self) -> None:
        now = int(self.model.num_timesteps)
        if now == self.saved:
            return
        os.makedirs(self.wanted.out, exist_ok=True)
        path = os.path.join(self.wanted.out, f"step_{now}.zip")
        # Runs in an interpreter without palaestra, so it cannot import `palaestra.files.atomic`.
        temporary = os.path.join(self.wanted.out, f".step_{now}.tmp.zip")
        self.model.save(temporary)
        os.replace(temporary, path)
        with open(path, "rb") as file:
            sha256 = hashlib.sha256(file.read()).hexdigest()
        update = int(getattr(self.model, "_n_updates", 0))
        say("CheckpointSaved", update=update, env_step=now, path=path, sha256=sha256)
        self.saved = now


def parse(words: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("algorithm", help="stable_baselines3:PPO")
    parser.add_argument("--env", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-timesteps", type=int, required=True)
    parser.add_argument(
        "--config", default="{}", help="JSON: algorithm, policy, num_envs, env_kwargs, checkpoint_every"
    )
    parser.add_argument("--out", required=True, help="where checkpoints go")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--load", default="", help="begin with the weights of this checkpoint")
    parser.add_argument("--resume", default="", help="go on from this checkpoint")
    parser.add_argument("--video", action="store_true")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(Training(parse(sys.argv[1:])).run())
