"""Policies of checkpoints in processes of their own, as a play starts them."""

import os

from palaestra.files.atomic import read_json
from palaestra.runs.checkpoints.pickle_scan import scan
from palaestra.runs.runner import Machine, PolicyRequest
from palaestra.runs.spec import RunSpec
from palaestra.train.play.environment import PolicyInput
from palaestra.train.play.policies import PolicyCommand, PolicyProcess

MACHINE = Machine(environment=dict(os.environ), free_disk_bytes=1 << 40)


def plan_policy(runner, home, checkpoint, *, deterministic=True, env_id="", **parameters):
    """The plan for a checkpoint of a run in this home, or for an imported one."""
    spec, command = None, {}
    if checkpoint.run_id:
        run = home.run(checkpoint.run_id)
        spec, command = RunSpec.model_validate(read_json(run.spec)), read_json(run.attempt(checkpoint.attempt).command)
    request = PolicyRequest(
        checkpoint=checkpoint,
        spec=spec,
        command=command,
        deterministic=deterministic,
        env_id=env_id,
        parameters=parameters,
        unsafe=scan(checkpoint.path).reason,
    )
    return runner.plan_policy(request, MACHINE)


class Acting:
    """A policy process that is asked one observation after the other."""

    def __init__(self, plan):
        self.process = PolicyProcess(PolicyCommand(argv=plan.argv, environment=plan.environment, cwd=plan.cwd))
        self._messages = []
        self.first = self.receive()

    def receive(self):
        """The header of the next message."""
        while not self._messages:
            self._messages += self.process.read()
        return self._messages.pop(0).header

    def act(self, observation):
        arrays = observation if isinstance(observation, dict) else {"": observation}
        self.process.ask(PolicyInput(arrays))
        return self.receive()


def ask_policy(plan, observations):
    """Its first message, and its answers to observations."""
    acting = Acting(plan)
    try:
        assert acting.first["type"] == "ready", acting.first
        acting.process.begin("", 0)
        answers = [acting.act(observation) for observation in observations]
        assert all(answer["type"] == "action" for answer in answers), answers
        return acting.first, answers
    finally:
        acting.process.close()


def ask_in_vain(plan):
    """The message of a policy that cannot be loaded."""
    acting = Acting(plan)
    try:
        assert acting.first["type"] == "failed", acting.first
        return acting.first
    finally:
        acting.process.close()
