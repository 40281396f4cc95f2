"""The policy of a play: the plans and tables of a checkpoint choose the actions, without XMPP and without learning.

It speaks the protocol of `palaestra/train/play/policies.py` on its standard streams.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, BinaryIO

from .actions import PlanActions
from .agent import Body, LogCapture, PlanError, build_agent, step_agent
from .checkpoint import AgentState, BadCheckpoint, load_checkpoint, read_checkpoint
from .skills import QLearning, Skill, SkillLibrary, write_table
from .worlds import World, load_module, make_env

_MAX_INSTRUCTIONS = 100_000
_BELIEFS_SHOWN = 50


class CheckpointAgent:
    """The agent of a checkpoint, which says what it would do in each state."""

    def __init__(self, path: str, sha256: str, *, deterministic: bool) -> None:
        state, agent, _ = read_checkpoint(path, sha256)
        self._world = World(make_env(state.env_id, state.env_kwargs), state.family)
        self._library = SkillLibrary(self._world.states, self._world.actions, QLearning(**agent["q_learning"]), seed=0)
        self._state, self._asl = load_checkpoint(path, self._library, state.env_id, sha256)
        self._library.explores = not deterministic
        self._capture = LogCapture()
        self._path = os.path.join(path, "plans.asl")
        self.begin(0)

    @property
    def state(self) -> AgentState:
        """What the checkpoint says about the agent."""
        return self._state

    @property
    def env(self) -> Any:
        """The environment that it was trained in."""
        return self._world.env

    def begin(self, seed: int) -> None:
        """Begin an episode with the beliefs of the checkpoint."""
        self._body, self._agent = self._build(seed)
        self._announced = self._shown_skill()

    def act(self, state: int) -> dict[str, Any]:
        """The action for a state, and what led to it. `PlanError` if the plans choose none."""
        action = self._reason(state)
        if action is None:
            raise PlanError(f"{self._path}: the plans choose no action in state {state}")
        body, skill = self._body, self._shown_skill()
        row = state if body.row is None and self._has_table else body.row
        rows = [[]] if skill is None or row is None else write_table(skill.q[row : row + 1])
        answer = {
            "action": action,
            "outputs": {
                "q_values": rows[0],
                "plan": body.plan,
                "confidence": body.confidence(),
                "beliefs": body.beliefs()[:_BELIEFS_SHOWN],
            },
        }
        if skill is not self._announced and self._has_table:
            self._announced = skill
            answer["q_table"] = self.q_table()
        return answer

    def q_table(self) -> list[list[float]] | None:
        """The values of the skill in use; None as long as it could be one of several, and for parts of a task."""
        skill = self._shown_skill()
        return write_table(skill.q) if skill is not None and self._has_table else None

    @property
    def _has_table(self) -> bool:
        """Whether a skill has one row per state of the environment. Those of Taxi have one per cell."""
        return self._state.family != "taxi"

    def _shown_skill(self) -> Skill | None:
        """The skill that the plans used last in this episode, or the only one."""
        skills = self._library.skills
        only = next(iter(skills.values())) if len(skills) == 1 else None
        return skills.get(self._body.last_skill, only)

    def _reason(self, state: int) -> int | None:
        """Let the plans run until they do something."""
        body = self._body
        body.take_choice()
        body.row = None
        if not body.is_over:
            body.observe(state)
        for _ in range(_MAX_INSTRUCTIONS):
            has_more = step_agent(self._agent, self._capture)
            choice = body.take_choice()
            if choice is not None or not has_more:
                return choice
            if body.world.state != state:  # the plans have begun the episode in our own copy of the world
                body.observe(state)
        return None

    def _build(self, seed: int) -> tuple[Body, Any]:
        body = Body(self._world, self._library, episodes=1, seed=seed, threshold=1.0)
        body.is_external = True
        actions = PlanActions(body).add_to()
        return body, build_agent(self._asl, self._path, body, actions, self._capture, self._state.beliefs)


def serve(args: argparse.Namespace, source: BinaryIO, target: BinaryIO) -> int:
    """Load the agent and answer messages until the source ends; returns the exit code."""
    protocol = load_module("policy_program", "runs", "runners", "programs", "policy_program.py")

    def send(header: dict[str, Any]) -> None:
        target.write(protocol.pack(header))
        target.flush()

    try:
        agent = CheckpointAgent(args.checkpoint, args.sha256, deterministic=not args.sample)
    except BadCheckpoint as error:
        send({"type": "failed", "text": f"It cannot act: {error.args[0]}.", "remedy": error.args[1]})
        return 1
    except Exception as error:
        text = f"It cannot be loaded in {sys.executable} ({type(error).__name__}: {error})."
        send({"type": "failed", "text": text[:2000], "remedy": "The log of the play has the details"})
        raise
    table = agent.q_table()
    table_fields = {} if table is None else {"q_table": table}
    send({"type": "ready", **protocol.describe_spaces(agent.env), "notes": [], **table_fields})
    for header, payload in protocol.read_messages(source):
        if header.get("type") == "begin":
            agent.begin(int(header.get("seed", 0)))
        elif header.get("type") == "act":
            try:
                arrays = protocol.read_arrays(header, payload)
                answer = agent.act(int(arrays[""].reshape(-1)[0]))
            except Exception as error:
                text = f"It cannot act on this observation ({type(error).__name__}: {error})."
                send({"type": "failed", "text": text[:2000]})
                raise
            send({"type": "action", **answer})
    return 0


def main(argv: list[str]) -> int:
    """Serve a play on the standard streams."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--sha256", required=True, help="of its manifest")
    parser.add_argument("--sample", action="store_true", help="explore as in training")
    args = parser.parse_args(argv)
    # Plans print to standard output; only messages may reach the play.
    with os.fdopen(os.dup(1), "wb") as messages:
        os.dup2(2, 1)
        return serve(args, sys.stdin.buffer, messages)
