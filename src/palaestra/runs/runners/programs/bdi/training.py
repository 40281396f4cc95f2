"""Trains one BDI agent and reports events as marked lines on stdout. SIGTERM saves a checkpoint and ends it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from typing import Any

import numpy as np

from .agent import Body, LogCapture, PlanError
from .checkpoint import AgentState, BadCheckpoint, load_checkpoint, save_checkpoint
from .skills import QLearning, SkillLibrary, write_table
from .worlds import World, find_family, make_env

FAILED, STOPPED = 1, 130
_AGENT = "agent"
_MAX_SNAPSHOT_STATES = 1000
_PLANS_DIRECTORY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "plans")


class CannotTrain(Exception):
    """The training cannot begin. `args` are the reason and the remedy."""


def emit(kind: str, **fields: Any) -> None:
    """Print an event."""
    sys.stdout.write("@palaestra " + json.dumps({"kind": kind, **fields}) + "\n")
    sys.stdout.flush()


def find_plans(asl: str, family: str) -> str:
    """The path of the plan file: the given one, else that of the family."""
    return asl or os.path.join(_PLANS_DIRECTORY, f"{family}.asl")


def read_plans(path: str) -> str:
    """The text of a plan file. `CannotTrain` if it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise CannotTrain(f"the plans {path} cannot be read ({error})", "Give the path of an .asl file") from None


class BdiTraining:
    """One training run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.settings: dict[str, Any] = json.loads(args.config)
        self._returns: list[float] = []
        self._successes: list[bool] = []
        self._saved_step = -1
        self._reported_belief = self._reported_table = float("-inf")
        self._reported_at, self._reported_step = time.monotonic(), 0
        self._server: Any = None
        self.body: Body = self._build_body()
        self.asl_path = find_plans(self.settings.get("asl") or "", self.body.world.family)
        self.asl = read_plans(self.asl_path)
        self._beliefs: list[str] = []
        if args.load:
            self._load(args.load)

    def _build_body(self) -> Body:
        settings = self.settings
        try:
            env = make_env(self.args.env, settings.get("env_kwargs") or {}, settings["max_episode_steps"])
            world = World(env, find_family(self.args.env))
        except Exception as error:
            reason = f"{self.args.env} cannot be used ({type(error).__name__}: {error})"
            raise CannotTrain(reason, "Use FrozenLake, CliffWalking, Taxi or palaestra/GridWorld-v0") from error
        library = SkillLibrary(world.states, world.actions, QLearning(**settings["q_learning"]), self.args.seed)
        body = Body(
            world,
            library,
            episodes=settings["episodes"],
            seed=self.args.seed,
            threshold=settings["cache_threshold"],
        )
        body.on_episode, body.on_step = self._finish_episode, self._report_beliefs
        return body

    def _load(self, path: str) -> None:
        try:
            state, _ = load_checkpoint(path, self.body.library, self.args.env)
        except BadCheckpoint as error:
            raise CannotTrain(f"the warm start {path}: {error.args[0]}", error.args[1]) from None
        self._beliefs = state.beliefs
        emit("LogLine", level="info", text=f"warm start: {len(self.body.library.skills)} tables of {state.env_id}")

    async def run(self) -> int:
        """Train to the end; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        agent = await self._start_agent()
        emit("PhaseChanged", phase="running", reason="started")
        self._reported_at = time.monotonic()
        agent.released.set()
        try:
            await agent.result
        except PlanError as error:
            raise CannotTrain(f"a plan failed: {error}", "Repair the plans, or add one that always applies") from None
        finally:
            if self.body.env_step:
                self._save()
            await agent.log_out()
            if self._server is not None:
                await self._server.stop()
        self._report_metrics()
        self._report_beliefs(is_last=True)
        if agent.ignored_messages:
            emit("LogLine", level="warning", text=f"{agent.ignored_messages} messages were ignored")
        self._export()
        ended = ("stopped", "asked") if self.body.stop_requested else ("succeeded", "done")
        emit("PhaseChanged", phase=ended[0], reason=ended[1])
        return STOPPED if self.body.stop_requested else 0

    async def _start_agent(self) -> Any:
        from . import xmpp

        settings = self.settings["xmpp"]
        peers = tuple(settings["peers"])
        try:
            if settings["host"]:
                account = xmpp.Account(
                    host=settings["host"],
                    port=settings["port"] or 5222,
                    jid=settings["jid"],
                    password=os.environ.get(settings["password_variable"], ""),
                    verify_tls=settings["verify_tls"],
                    register=False,
                    timeout_s=settings["timeout_s"],
                    peers=peers,
                )
            else:
                self._server = xmpp.EmbeddedServer(settings["port"], settings["timeout_s"], peers)
                account = await self._server.start()
            agent = xmpp.BdiLearner(account, self.body, self.asl, self.asl_path, LogCapture(), self._beliefs)
            await agent.log_in()
        except xmpp.XmppError as error:
            raise CannotTrain(error.args[0], error.args[1]) from None
        except PlanError as error:
            raise CannotTrain(f"the plans cannot be used: {error}", "Correct the line") from None
        if self._server is not None:
            self._server.close_registration()
        emit("LogLine", level="info", text=f"{account.jid} is logged in at {account.host}:{account.port}")
        return agent

    def _stop(self) -> None:
        self.body.stop_requested = True

    def _finish_episode(self) -> None:
        body = self.body
        self._returns.append(body.episode_return)
        self._successes.append(body.outcome == "success")
        emit(
            "EpisodeSummary",
            env_step=body.env_step,
            episode=body.episode,
            env_index=0,
            episode_return=body.episode_return,
            length=body.length,
        )
        if body.episode % self.settings["report_every"] == 0:
            self._report_metrics()
        every = self.settings["checkpoint_every"]
        if every and body.episode % every == 0:
            self._save()
        self._report_beliefs()

    def _report_metrics(self) -> None:
        body, library = self.body, self.body.library
        recent, successes = self._returns[-100:], self._successes[-100:]
        actions = sum(body.choosers.values())
        if body.env_step == self._reported_step:
            return
        now = time.monotonic()
        elapsed, steps = now - self._reported_at, body.env_step - self._reported_step
        metrics = {
            "success_rate": sum(successes) / max(1, len(successes)),
            "episodes": body.episode,
            "td_error": float(np.mean(body.td_errors)) if body.td_errors else 0.0,
            "actions_by_plan": body.choosers["plan"] / actions,
            "actions_by_policy": body.choosers["policy"] / actions,
            "actions_by_skill": body.choosers["skill"] / actions,
            "plans_used": len(body.actions_by_plan),
            "cached_policies": len(library.policies),
            "policy_repairs": body.repairs,
            "recovered_failures": body.agent.recovered_failures,
            "skills": len(library.skills),
            "forbidden_actions": sum(int(skill.forbidden.sum()) for skill in library.skills.values()),
            "confidence": body.confidence() or 0.0,
            "steps_per_second": steps / elapsed if elapsed > 0 else 0.0,
        }
        if recent:
            metrics["episode_return"] = float(np.mean(recent))
        if body.last_skill:
            metrics["epsilon"] = library.epsilon(body.last_skill)
        emit("TrainingStep", update=body.episode, env_step=body.env_step, metrics=metrics)
        body.td_errors.clear()
        self._reported_at, self._reported_step = now, body.env_step

    def _report_beliefs(self, *, is_last: bool = False) -> None:
        now, interval = time.monotonic(), self.settings["belief_interval_s"]
        if not is_last and now - self._reported_belief < interval:
            return
        self._reported_belief = now
        body = self.body
        beliefs: dict[str, Any] = {
            "beliefs": body.beliefs(),
            "intentions": body.agent.describe_intentions(),
            "plan": body.plan,
            "confidence": body.confidence(),
            "episode": body.episode,
            "step": body.length,
        }
        table = self._table_snapshot()
        if table is not None and (is_last or now - self._reported_table >= 1.0):
            self._reported_table = now
            beliefs["q_values"] = table
        emit("Belief", agent=_AGENT, beliefs=beliefs)

    def _table_snapshot(self) -> list[list[float]] | None:
        skill = self.body.library.skills.get(self.body.last_skill)
        return None if skill is None or len(skill.q) > _MAX_SNAPSHOT_STATES else write_table(skill.q)

    def _save(self) -> str:
        body = self.body
        path = os.path.join(self.args.out, f"step_{body.env_step}")
        if body.env_step == self._saved_step:
            return path
        state = AgentState(
            env_id=self.args.env,
            env_kwargs=self.settings.get("env_kwargs") or {},
            family=body.world.family,
            states=body.world.states,
            actions=body.world.actions,
            episode=body.episode,
            env_step=body.env_step,
            beliefs=body.learned_beliefs(),
            plans=body.agent.labels,
        )
        os.makedirs(self.args.out, exist_ok=True)
        sha256 = save_checkpoint(path, state, body.library, self.asl)
        emit("CheckpointSaved", update=body.episode, env_step=body.env_step, path=path, sha256=sha256)
        self._saved_step = body.env_step
        return path

    def _export(self) -> None:
        """Copy the last checkpoint to the library of named agents, also after a stop."""
        if not self.args.export or not self.body.env_step:
            return
        path = self._save()
        try:
            replace_directory(path, self.args.export)
        except OSError as error:
            reason = f"the checkpoint {path} cannot be kept as {self.args.export} ({error})"
            raise CannotTrain(reason, "Copy that directory there, or use its path with --warm-start") from None
        emit("LogLine", level="info", text=f"kept as {self.args.export}")


def replace_directory(source: str, target: str) -> None:
    """Put a copy of a directory in place of another one, which stays if that fails. Between two renames none exists."""
    parent, name = os.path.split(target)
    # Hidden, because every visible directory there is the name of an agent.
    new, old = (os.path.join(parent, f".{name}.{os.getpid()}.{suffix}") for suffix in ("new", "old"))
    try:
        shutil.copytree(source, new)
        if os.path.isdir(target):
            os.rename(target, old)
        try:
            os.rename(new, target)
        except OSError:
            with contextlib.suppress(OSError):
                os.rename(old, target)
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def main(argv: list[str]) -> int:
    """Train; an error is one line with reason and remedy, and exit code 1."""
    try:
        return asyncio.run(BdiTraining(parse_args(argv)).run())
    except CannotTrain as error:
        reason, remedy = error.args
        emit("LogLine", level="error", text=f"{reason}. {remedy}")
        emit("PhaseChanged", phase="failed", reason=reason)
        sys.stdout.write(f"spade-bdi: {reason}. {remedy}\n")
        sys.stdout.flush()
        return FAILED


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", required=True, help="JSON: the keys of the runner's configuration")
    parser.add_argument("--out", required=True, help="directory for checkpoints")
    parser.add_argument("--load", default="", help="start with the skills of this checkpoint")
    parser.add_argument("--export", default="", help="copy the last checkpoint to this directory")
    return parser.parse_args(argv)
