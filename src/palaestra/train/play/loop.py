"""The loop of a play: who acts at each step, when the next step is due, and what is recorded and reported.

Decides without waiting: the worker calls `handle` with a control, `read_policy` when a policy has answered and `tick`
when `deadline` has passed. Time comes in as an argument.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

from palaestra.errors import ConfigError
from palaestra.runs.checkpoints.signature import find_incompatibilities
from palaestra.runs.play.episode import EpisodeWriter
from palaestra.runs.play.protocol import (
    Act,
    Actor,
    Control,
    Message,
    Mode,
    Pause,
    RemovePolicy,
    Reset,
    SetMode,
    SetRecording,
    SetSpeed,
    SingleStep,
    TakeControl,
)
from palaestra.runs.play.spec import PlaySpec
from palaestra.runs.play.state import EpisodeRecord, Outcome, PlayNotice, PlayState, PolicyStatus, Report, StepReport
from palaestra.train.play.environment import EncodedPicture, PlayEnvironment
from palaestra.train.play.grid import read_q_table
from palaestra.train.play.policies import ActingPolicy, Moment, Policy

_RESET_DELAY_S = 1.0
"""How long the last picture of an episode stays before the next one begins."""
_PICTURE_EVERY_S = 1 / 60
"""Faster plays report some steps without a picture."""
_MAX_LATE_S = 0.05
"""A play that is later, because it waited or the machine is slow, continues from now instead of hurrying."""
_MAX_MOVES = 16
_MAX_SEED = 2**31

SendReport: TypeAlias = Callable[[Report, bytes], None]
NewRecording: TypeAlias = Callable[[EpisodeRecord], EpisodeWriter]
Waiting: TypeAlias = Literal["", "move", "policy", "reset"]


class PlayLoop:
    """One play. The worker owns the sockets and the clock; this class owns the rules."""

    def __init__(
        self,
        environment: PlayEnvironment,
        spec: PlaySpec,
        play_id: str,
        *,
        send: SendReport,
        new_recording: NewRecording,
        wall_clock: Callable[[], float],
    ) -> None:
        self.environment, self._spec, self._play_id = environment, spec, play_id
        self._send, self._new_recording, self._wall_clock = send, new_recording, wall_clock
        self._mode: Mode = spec.mode
        self._control: Actor = "human" if spec.mode == "human" else "agent"
        self._paused, self._speed, self._recording = spec.paused, spec.speed, spec.recording
        self._episode, self._step, self._return = 0, 0, 0.0
        self._seed, self._next_seed = spec.seed, spec.seed
        self._is_over, self._step_once = False, False
        self._held: Act | None = None
        self._moves: deque[Act] = deque(maxlen=_MAX_MOVES)
        self._input = 0
        self._due, self._last_picture_at = 0.0, -1.0
        self._acting: ActingPolicy | None = None
        self._loading: ActingPolicy | None = None
        self._failed_load: PolicyStatus | None = None
        self._writer: EpisodeWriter | None = None
        self._reported_waiting: Waiting = ""

    # ------------------------------------------------------------------ what the worker calls

    def begin(self, now: float) -> None:
        """Begin the first episode."""
        self._reset(None, now)

    def deadline(self) -> float | None:
        """When `tick` is to be called; None while the play waits for a message."""
        if self._is_over:
            return self._due if self._spec.auto_reset and not self._paused else None
        if (self._paused and not self._step_once) or self._waits_for():
            return None
        if self._agent_acts() and (self._acting is None or not self._acting.has_answer):
            return None
        return self._due

    def tick(self, now: float) -> None:
        """Make the step that is due, or begin the next episode."""
        deadline = self.deadline()
        if deadline is not None and now >= deadline:
            if self._is_over:
                self._reset(None, now)
            else:
                self._step_once = False
                is_late = now - self._due > _MAX_LATE_S
                self._due = (now if is_late else self._due) + self._interval()
                self._perform(now)
        if self._waits_for() != self._reported_waiting:
            self.report_state()

    def handle(self, control: Control, now: float) -> None:
        """Apply a control of a client. `ConfigError` when it cannot be applied."""
        if isinstance(control, Act):
            self._accept_action(control, now)
            return
        if isinstance(control, Reset):
            self._finish_recording("stopped")
            self._reset(control.seed, now)
            return
        if isinstance(control, SingleStep):
            if self._is_over:
                self._reset(None, now)
            self._step_once, self._due = True, now
            return
        if isinstance(control, Pause):
            self._paused, self._due = control.on, now
        elif isinstance(control, SetSpeed):
            self._speed, self._due = float(control.factor), now
        elif isinstance(control, SetMode):
            self._mode, self._control = control.mode, "human" if control.mode == "human" else "agent"
            self._release_controls(now)
        elif isinstance(control, TakeControl):
            if self._mode != "hybrid":
                raise ConfigError("control", control.by, f"the mode is {self._mode}", "Change to hybrid first")
            self._control = control.by
            self._release_controls(now)
        elif isinstance(control, RemovePolicy):
            self._remove_policies()
        elif isinstance(control, SetRecording):
            self._recording = control.on
        self.report_state()

    def load(self, policy: Policy, status: PolicyStatus) -> None:
        """Load a policy beside the one that acts, which it replaces when it is ready."""
        if self._loading is not None:
            self._loading.policy.close()
        self._loading, self._failed_load = ActingPolicy(policy, dataclasses.replace(status, state="loading")), None
        self.report_state()

    def report_failed_load(self, status: PolicyStatus) -> None:
        """Report a policy that was not started because it failed or needs consent; the current one goes on acting."""
        self._failed_load = status
        self.report_state()

    def policies(self) -> Iterator[Policy]:
        """The policies that may send messages."""
        yield from (seat.policy for seat in (self._acting, self._loading) if seat is not None)

    def read_policy(self, policy: Policy) -> None:
        """Read the messages of a policy."""
        seat = next(
            (seat for seat in (self._acting, self._loading) if seat is not None and seat.policy is policy), None
        )
        if seat is None:
            return
        try:
            for message in policy.read():
                self._handle_policy_message(seat, message)
        except EOFError as error:
            self._lose(seat, str(error))

    def close(self) -> None:
        """Finish the recording and end the policies."""
        self._finish_recording("stopped")
        for policy in self.policies():
            policy.close()

    def report_state(self) -> None:
        """Send the state of the play."""
        self._reported_waiting = self._waits_for()
        self._send(self.state(), b"")

    def state(self) -> PlayState:
        """The state of the play."""
        loading = self._failed_load if self._loading is None else self._loading.status
        return PlayState(
            environment=self.environment.description,
            mode=self._mode,
            control="agent" if self._agent_acts() else "human",
            paused=self._paused,
            speed=self._speed,
            seed=self._seed,
            episode=self._episode,
            episode_id="" if self._writer is None else self._writer.record.episode_id,
            recording=self._recording,
            waiting=self._waits_for(),
            policy=None if self._acting is None else self._acting.status,
            loading=loading,
        )

    # ------------------------------------------------------------------ who acts

    def _agent_acts(self) -> bool:
        if self._mode == "hybrid":
            # A held key or a move of the person overrides the agent.
            return self._control == "agent" and self._held is None and not self._moves
        return self._mode == "agent"

    def _waits_for(self) -> Waiting:
        """What the play waits for before it can make a step."""
        if self._is_over:
            return "reset"
        if self._agent_acts():
            return "policy" if self._acting is None else ""
        description = self.environment.description
        if description.turn_based:
            return "" if self._moves else "move"
        # Environments without an action that does nothing stand still until the person acts.
        return "move" if self._held is None and description.controls.idle is None else ""

    def _accept_action(self, control: Act, now: float) -> None:
        if self._mode == "agent":
            raise ConfigError("action", control.action, "the agent acts", "Change to human or hybrid")
        if not self.environment.description.turn_based:
            self._held = None if control.action is None else control
            self._input = max(self._input, control.input)
        elif control.action is not None and not self._is_over:
            self._moves.append(control)
            # The pace is for agents: a person sees the effect of a move at once.
            self._due = min(self._due, now)
        self._ask()

    def _release_controls(self, now: float) -> None:
        self._held, self._due = None, now
        self._moves.clear()
        self._ask()

    def _take_action(self) -> tuple[Actor, Any]:
        if self._agent_acts():
            assert self._acting is not None
            return "agent", self._acting.take()
        if self._acting is not None:
            self._acting.discard()
        if self.environment.description.turn_based:
            move = self._moves.popleft()
            self._input = max(self._input, move.input)
            return "human", move.action
        return "human", self.environment.description.controls.idle if self._held is None else self._held.action

    # ------------------------------------------------------------------ steps and episodes

    def _interval(self) -> float:
        return 1.0 / (self.environment.description.fps * self._speed)

    def _perform(self, now: float) -> None:
        actor, action = self._take_action()
        try:
            result = self.environment.step(action)
        except ConfigError as error:
            if actor == "agent" and self._acting is not None:
                self._lose(self._acting, f"its action was refused: {error.reason}")
            else:
                self._held = None
                self._send(PlayNotice(level="warning", text=str(error)), b"")
            return
        self._step += 1
        self._return += result.reward
        is_last = result.terminated or result.truncated
        report = StepReport(
            episode=self._episode,
            step=self._step,
            action=action,
            actor=actor,
            reward=result.reward,
            episode_return=self._return,
            terminated=result.terminated,
            truncated=result.truncated,
            success=result.success,
            outputs=self._acting.outputs if actor == "agent" and self._acting is not None else {},
            input=self._input,
        )
        self._publish(report, now, needs_picture=is_last or self._paused)
        if is_last:
            self._is_over = True
            self._moves.clear()
            self._finish_recording("terminated" if result.terminated else "truncated")
            self._due = now + _RESET_DELAY_S / max(1.0, self._speed)
        self._ask()

    def _publish(self, report: StepReport, now: float, *, needs_picture: bool) -> None:
        """Take the picture of a step, record the step and send it."""
        picture = EncodedPicture()
        # A little early counts as due: ticks are never exactly on time.
        is_due = now - self._last_picture_at >= 0.9 * max(_PICTURE_EVERY_S, min(self._interval(), 0.1))
        if needs_picture or is_due or self._interval() >= _PICTURE_EVERY_S:
            picture, self._last_picture_at = self.environment.picture(), now
        report = dataclasses.replace(
            report,
            grid=self.environment.grid(None if self._acting is None else self._acting.q_table),
            width=picture.width,
            height=picture.height,
            time=self._wall_clock(),
        )
        if self._writer is not None:
            try:
                self._writer.add(report, picture.data, self.environment.policy_input().arrays)
            except OSError as error:
                self._abandon_recording(error)
        self._send(report, picture.data)

    def _reset(self, seed: int | None, now: float) -> None:
        """Begin an episode, with the next seed unless one is given."""
        self._seed = self._next_seed if seed is None else seed
        self._next_seed = (self._seed + 1) % _MAX_SEED
        self.environment.reset(self._seed)
        self._episode += 1
        self._step, self._return, self._is_over = 0, 0.0, False
        self._moves.clear()
        self._start_recording()
        if self._acting is not None:
            self._acting.begin(self.environment.description.instruction, self._seed)
        self._publish(StepReport(episode=self._episode, step=0, input=self._input), now, needs_picture=True)
        self._due = now + self._interval()
        self._ask()
        self.report_state()

    def _start_recording(self) -> None:
        if not self._recording:
            return
        description = self.environment.description
        record = EpisodeRecord(
            episode_id="",
            play_id=self._play_id,
            env_id=description.env_id,
            kind=description.kind,
            parameters=description.parameters,
            instruction=description.instruction,
            seed=self._seed,
            mode=self._mode,
            fps=description.fps,
            started=self._wall_clock(),
        )
        try:
            self._writer = self._new_recording(record)
        except OSError as error:
            self._abandon_recording(error)

    def _finish_recording(self, outcome: Outcome) -> None:
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        if self._step == 0:
            writer.discard()
            return
        policy = None if self._acting is None or not writer.record.agent_steps else self._acting.status
        played_by = {} if policy is None else {"policy": policy.name, "checkpoint": policy.checkpoint}
        try:
            writer.finish(outcome, self._wall_clock(), mode=self._mode, **played_by)
        except OSError as error:
            self._abandon_recording(error)

    def _abandon_recording(self, error: OSError) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer, self._recording = None, False
        text = f"The episode is no longer recorded ({error.strerror or error})."
        self._send(PlayNotice(level="warning", text=text, remedy="Free space on the disk of the state directory"), b"")
        self.report_state()

    # ------------------------------------------------------------------ policies

    @property
    def _moment(self) -> Moment:
        return self._episode, self._step

    def _ask(self) -> None:
        """Ask the policy about the current observation if it may have to act."""
        if self._acting is not None and self._mode != "human" and not self._is_over:
            self._acting.ask(self._moment, self.environment.policy_input)

    def _handle_policy_message(self, seat: ActingPolicy, message: Message) -> None:
        if message.type == "action" and seat is self._acting:
            if not seat.accept(message, self._moment):
                self._ask()
        elif message.type == "ready" and seat is self._loading:
            self._activate(seat, message)
        elif message.type == "failed":
            self._lose(seat, str(message.header.get("text", "")), str(message.header.get("remedy", "")))

    def _activate(self, seat: ActingPolicy, message: Message) -> None:
        """Let a loaded policy act, if it fits the environment; else the current one goes on acting."""
        description = self.environment.description
        spaces = {"observation_space": description.observation_space, "action_space": description.action_space}
        reasons = find_incompatibilities(message.header, {key: value for key, value in spaces.items() if value})
        if reasons:
            remedy = "Choose a policy for this environment, or switch to the environment it was trained in"
            self._lose(seat, f"It does not fit {description.env_id}: {'; '.join(reasons)}.", remedy)
            return
        if self._acting is not None:
            self._acting.policy.close()
        notes = seat.status.notes + tuple(str(note) for note in message.header.get("notes") or ())
        seat.status = dataclasses.replace(seat.status, state="ready", notes=notes)
        seat.own_table = read_q_table(message.header.get("q_table"))
        self._acting, self._loading = seat, None
        seat.begin(description.instruction, self._seed)
        self._ask()
        self.report_state()

    def _lose(self, seat: ActingPolicy, text: str, remedy: str = "") -> None:
        """Drop a policy that failed. One that was loading leaves the current one in place."""
        seat.policy.close()
        self._failed_load = dataclasses.replace(seat.status, state="failed", text=text, remedy=remedy)
        if seat is self._loading:
            self._loading = None
        else:
            self._acting = None
            self._send(PlayNotice(level="error", text=f"{seat.status.name}: {text}", remedy=remedy), b"")
        self.report_state()

    def _remove_policies(self) -> None:
        for policy in self.policies():
            policy.close()
        self._acting = self._loading = self._failed_load = None
