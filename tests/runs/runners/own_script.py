"""A minimal trainer: it prints one marked line per event."""
# ruff: noqa: T201  this is how it reports

import argparse
import json

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--learning_rate", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

loss = 1.0
for step in range(10, args.steps + 1, 10):
    loss *= 1 - args.learning_rate
    print("@palaestra", json.dumps({"kind": "TrainingStep", "env_step": step, "metrics": {"loss": loss}}), flush=True)
    episode = {"kind": "EpisodeSummary", "env_step": step, "episode_return": float(step), "length": 10}
    print("@palaestra", json.dumps(episode), flush=True)
