"""Answers for sixteen actors at once against one by one: samples per second of processor time, and by the clock.

`python -m benchmarks.ui_inference` asks the built-in tiny model about first screens of MiniWoB++ tasks, as sixteen
actors do: all on different screens, and in two groups of eight that share one. What the model remembers of pictures is
forgotten before every round, because an actor asks about new screens. Lanes take turns. Writes
benchmarks/results/ui_inference.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from benchmarks.machine import facts, load
from palaestra.policy.vlm import Picture, SampleRequest, VLMPolicy
from palaestra.policy.vlm.prompt import Prompt
from palaestra.sessions.clients.provider import find_sessions
from palaestra.train.held_out import play_held_out
from palaestra.train.screen_config import screen_config_from

RESULTS = Path(__file__).parent / "results"
ACTORS = 16
TASKS = ("miniwob/click-dialog", "miniwob/focus-text", "miniwob/click-tab", "miniwob/click-button")


def prompts(policy: VLMPolicy, config) -> list[Prompt]:
    """What the model is asked about the first screen of sixteen held-out tasks."""
    with ExitStack() as stack:
        actors, session_type = config.actor_pool.target_concurrent_actors, config.actor.session_type
        address = find_sessions(config.environment, stack, actors=actors, session_type=session_type)
        played = play_held_out(config, policy, address, episodes=ACTORS)
    found = []
    for one in played:
        turn = one.turns[0]
        shown = zip(turn.pictures, turn.image_sizes, strict=True)
        found.append(Prompt(turn.prompt_ids, tuple(Picture(one.pictures[sha], size) for sha, size in shown)))
    return found


def time_answers(policy: VLMPolicy, requests: list[SampleRequest], batch: int) -> tuple[float, float]:
    """Seconds by the clock and of the processor for all answers, `batch` at a time."""
    policy.learner.feature_cache.clear()
    policy.learner.preprocessor.cache.clear()
    began, worked = time.perf_counter(), time.process_time()
    for start in range(0, len(requests), batch):
        policy.sample(requests[start : start + batch])
    return time.perf_counter() - began, time.process_time() - worked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    config = screen_config_from(
        {
            "model": {"name": "tiny", "max_new_tokens": 24, "history": 0},
            "tasks": [{"task": task, "params": {"step_limit": 1}} for task in TASKS],
        }
    )
    policy = VLMPolicy.from_config(config.model)
    each = prompts(policy, config)
    lanes = {"sixteen screens": each, "two groups of eight": [each[0]] * 8 + [each[1]] * 8}
    found = {"machine": facts(), "rounds": []}
    for number in range(asked.rounds + 1):
        for lane, own in lanes.items():
            requests = [SampleRequest(prompt, 1000 * number + place) for place, prompt in enumerate(own)]
            for batch in (1, ACTORS):
                clock, worked = time_answers(policy, requests, batch)
                if number:  # the first round warms up
                    found["rounds"].append({"lane": lane, "batch": batch, "clock_s": clock, "processor_s": worked})
    found["load_at_end"] = load()
    (RESULTS / "ui_inference.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "ui_inference.md").write_text(table(found["rounds"], lanes))
    print(table(found["rounds"], lanes))


def table(rounds: list[dict], lanes) -> str:
    lines = [
        "| sixteen actors on | one by one, answers/s | together, answers/s | ratio | by the clock |",
        "| --- | --- | --- | --- | --- |",
    ]
    for lane in lanes:

        def seconds(batch: int, kind: str, lane: str = lane) -> float:
            own = [one[kind] for one in rounds if (one["lane"], one["batch"]) == (lane, batch)]
            return float(np.median(own))

        alone, together = seconds(1, "processor_s"), seconds(ACTORS, "processor_s")
        clock = seconds(1, "clock_s") / seconds(ACTORS, "clock_s")
        lines.append(
            f"| {lane} | {ACTORS / alone:.1f} | {ACTORS / together:.1f} | {alone / together:.1f}x | {clock:.1f}x |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
