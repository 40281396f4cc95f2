"""Train one algorithm of Stable-Baselines3, and report events as marked lines on stdout.

Runs by path in an interpreter that has stable_baselines3, and does not import palaestra. Resumes from a checkpoint, or
starts from the weights of one, without unpickling: parameters are read as weights, counters as JSON. SIGTERM saves a
checkpoint and exits.
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

VIDEO_EVERY = 10_000
COUNTERS = ("num_timesteps", "_n_updates", "_episode_num")


def emit(kind: str, **fields: Any) -> None:
    """Print an event."""
    sys.stdout.write("@palaestra " + json.dumps({"kind": kind, **fields}) + "\n")
    sys.stdout.flush()


def json_number(value: float) -> Any:
    """The number, or a string if it is not finite, because JSON has no such numbers."""
    value = float(value)
    return value if math.isfinite(value) else "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


class Sb3Training:
    """One training run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.settings: dict[str, Any] = json.loads(args.config)
        self.stopped = False
        self.episodes = 0
        self.saved = -1
        self.model = self._build_model()

    def run(self) -> int:
        """Train; returns the exit code."""
        signal.signal(signal.SIGTERM, self._handle_signal)
        signal.signal(signal.SIGINT, self._handle_signal)
        model = self.model
        start = self._load_checkpoint()
        logger = importlib.import_module("stable_baselines3.common.logger")
        # A bound method as a class attribute stays bound to this run, so the writer needs no state.
        writer = type("EventWriter", (logger.KVWriter,), {"write": self._write_metrics, "close": lambda _: None})
        model.set_logger(logger.Logger(folder=None, output_formats=[writer()]))
        emit("PhaseChanged", phase="running", reason="resumed" if start else "started")
        interval = self.settings.get("log_interval")
        model.learn(
            max(0, self.args.total_timesteps - start),
            callback=self._on_step,
            reset_num_timesteps=not start,
            **({} if interval is None else {"log_interval": interval}),
        )
        self._save()
        model.get_env().close()
        emit(
            "PhaseChanged", phase="stopped" if self.stopped else "succeeded", reason="asked" if self.stopped else "done"
        )
        return 130 if self.stopped else 0

    def _build_model(self) -> Any:
        """Build the algorithm and its environments."""
        module, _, name = self.args.algorithm.partition(":")
        util = importlib.import_module("stable_baselines3.common.env_util")
        env_kwargs = dict(self.settings.get("env_kwargs") or {})
        if self.args.video:
            env_kwargs["render_mode"] = "rgb_array"
        env = util.make_vec_env(
            self.args.env, n_envs=self.settings.get("num_envs") or 1, seed=self.args.seed, env_kwargs=env_kwargs
        )
        if self.args.video:
            vec_env = importlib.import_module("stable_baselines3.common.vec_env")
            env = vec_env.VecVideoRecorder(env, "videos", lambda step: step % VIDEO_EVERY == 0, video_length=200)
        algorithm = getattr(importlib.import_module(module), name)
        return algorithm(
            self.settings.get("policy") or "MlpPolicy",
            env,
            seed=self.args.seed,
            device=self.args.device,
            **self.settings.get("algorithm", {}),
        )

    def _load_checkpoint(self) -> int:
        """Load weights, and on a resume counters; returns the number of steps already taken."""
        path = self.args.resume or self.args.load
        if not path:
            return 0
        self.model.set_parameters(path, device=self.args.device)
        if not self.args.resume:
            return 0
        with zipfile.ZipFile(path) as archive:
            data = json.loads(archive.read("data"))
        for name in COUNTERS:
            if isinstance(data.get(name), int):
                setattr(self.model, name, data[name])
        self.saved = self.model.num_timesteps
        return int(self.model.num_timesteps)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True

    def _write_metrics(self, key_values: dict[str, Any], key_excluded: dict[str, Any], step: int = 0) -> None:
        metrics = {key: json_number(value) for key, value in key_values.items() if hasattr(value, "__float__")}
        update = int(getattr(self.model, "_n_updates", 0))
        emit("TrainingStep", update=update, env_step=int(step), metrics=metrics)

    def _on_step(self, local: dict[str, Any], _: dict[str, Any]) -> bool:
        now = int(self.model.num_timesteps)
        for index, info in enumerate(local.get("infos", ())):
            if "episode" in info:
                self.episodes += 1
                summary = info["episode"]
                emit(
                    "EpisodeSummary",
                    env_step=now,
                    episode=self.episodes,
                    env_index=index,
                    episode_return=json_number(summary["r"]),
                    length=int(summary["l"]),
                )
        every = self.settings.get("checkpoint_every")
        if every and now - max(self.saved, 0) >= every:
            self._save()
        return not self.stopped

    def _save(self) -> None:
        now = int(self.model.num_timesteps)
        if now == self.saved:
            return
        os.makedirs(self.args.out, exist_ok=True)
        path = os.path.join(self.args.out, f"step_{now}.zip")
        # `palaestra.files.atomic` cannot be imported here.
        temporary = os.path.join(self.args.out, f".step_{now}.tmp.zip")
        self.model.save(temporary)
        os.replace(temporary, path)
        with open(path, "rb") as file:
            sha256 = hashlib.sha256(file.read()).hexdigest()
        update = int(getattr(self.model, "_n_updates", 0))
        emit("CheckpointSaved", update=update, env_step=now, path=path, sha256=sha256)
        self.saved = now


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("algorithm", help="stable_baselines3:PPO")
    parser.add_argument("--env", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--total-timesteps", type=int, required=True)
    parser.add_argument(
        "--config", default="{}", help="JSON: algorithm, policy, num_envs, env_kwargs, checkpoint_every"
    )
    parser.add_argument("--out", required=True, help="directory for checkpoints")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--load", default="", help="start from the weights of this checkpoint")
    parser.add_argument("--resume", default="", help="resume from this checkpoint")
    parser.add_argument("--video", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(Sb3Training(parse_args(sys.argv[1:])).run())
