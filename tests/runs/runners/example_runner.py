"""A runner as another package brings it: the template, with a catalogue and checkpoints that play. Also its programs.

`python example_runner.py train --steps=N` trains, `python example_runner.py act CHECKPOINT` acts.
"""

import hashlib
import json
import os
import struct
import sys
from pathlib import Path


def train(directory, steps):
    """Learn which of two actions to take: always the second one."""
    checkpoints = Path(directory) / "checkpoints"
    checkpoints.mkdir(parents=True)
    path = checkpoints / "policy.json"
    path.write_text(json.dumps({"action": 1}))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    for event in (
        {"kind": "EpisodeSummary", "env_step": steps, "episode_return": 1.0, "length": steps},
        {"kind": "CheckpointSaved", "env_step": steps, "path": str(path), "sha256": sha256},
    ):
        print("@palaestra", json.dumps(event), flush=True)  # noqa: T201  this is how it reports


def act(checkpoint):
    """Speak the protocol of `train/play/policies.py`."""
    action = json.loads(Path(checkpoint).read_text())["action"]

    def send(header):
        text = json.dumps(header).encode()
        os.write(1, struct.pack("<II", len(text), 0) + text)

    send({"type": "ready", "action_space": {"type": "Discrete", "n": 2, "start": 0}, "notes": ["It learned little."]})
    while lengths := sys.stdin.buffer.read(8):
        header_bytes, payload_bytes = struct.unpack("<II", lengths)
        header = json.loads(sys.stdin.buffer.read(header_bytes))
        sys.stdin.buffer.read(payload_bytes)
        if header["type"] == "act":
            send({"type": "action", "action": action, "outputs": {"value": 0.5}})


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(sys.argv[2], int(sys.argv[3].partition("=")[2]))
    else:
        act(sys.argv[2])
else:
    from dataclasses import replace

    from palaestra.runs.catalogue import EnvironmentInfo, ScriptInfo
    from palaestra.runs.runner import Finding, PolicyPlan, RunnerCapabilities
    from palaestra.runs.runners.template import MyTrainerRunner

    class ExampleRunner(MyTrainerRunner):
        """Everything beyond the template is optional."""

        name = "example"
        capabilities = RunnerCapabilities(title="An example", offline_inference=True)

        def plan(self, spec, paths, machine):
            plan = super().plan(spec.model_copy(update={"script": __file__}), paths, machine)
            python, program, *flags = plan.argv
            argv = (python, program, "train", str(paths.attempt_dir), *(flag for flag in flags if "steps" in flag))
            return replace(plan, argv=argv, algorithm="second", env_id="CartPole-v1")

        def preflight(self, spec, machine):
            return super().preflight(spec.model_copy(update={"script": __file__}), machine)

        def plan_policy(self, request, machine):
            return PolicyPlan(argv=(sys.executable, __file__, "act", request.checkpoint.path))

        def scripts(self, spec, machine):
            return [ScriptInfo(name="second", title="Always the second", actions=("discrete",), plays=True)]

        def environments(self, spec, machine, *, refresh=False):
            return [EnvironmentInfo(env_id="CartPole-v1", group="Example")]

        def environment_parameters(self, env_id, spec, machine):
            return {"type": "object", "properties": {"speed": {"type": "number", "default": 1.0}}}

        def readiness(self, spec, machine):
            return [Finding("licence", "warning", "expires tomorrow", "Renew it")]
