"""The environment of a play: a Gymnasium environment, or a task on a screen in a browser."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from palaestra.env.factory import EnvFactory
from palaestra.env.vector import GymEnv
from palaestra.errors import ConfigError, EnvironmentContractError
from palaestra.runs.play.spec import PlaySpec
from palaestra.runs.play.state import CellGrid, Controls, EnvironmentDescription
from palaestra.runs.process.probe import space_json
from palaestra.train.play.controls import controls_of
from palaestra.train.play.grid import QTable, grid_reader

if TYPE_CHECKING:
    from palaestra.sessions.clients.blocking import BlockingSession
    from palaestra.sessions.screen import Screenshot

_JPEG_QUALITY = 80
_DEFAULT_FPS = 30.0
_MIN_FPS, _MAX_FPS = 1e-3, 1e4
_TURN_BASED_FPS = 10.0
"""Environments that render at this rate or below wait for the person."""
_SCREEN_FPS = 4.0


class EncodedPicture(NamedTuple):
    """An encoded picture; empty when the environment cannot render."""

    data: bytes = b""
    width: int = 0
    height: int = 0


@dataclass(frozen=True)
class Result:
    """The result of a step."""

    reward: float
    terminated: bool
    truncated: bool
    success: bool | None = None


@dataclass(frozen=True)
class PolicyInput:
    """What a policy needs to act: the arrays of an observation, or a picture of a screen."""

    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    picture: bytes = b""
    action_mask: list[int] | None = None


class PlayEnvironment(Protocol):
    """An environment that the worker steps. Bad actions raise `ConfigError`; other errors end the play."""

    description: EnvironmentDescription

    def reset(self, seed: int) -> None:
        """Begin an episode."""

    def step(self, action: Any) -> Result:
        """Perform an action, given as JSON data."""

    def picture(self) -> EncodedPicture:
        """A picture of the current state."""

    def policy_input(self) -> PolicyInput:
        """The observation that a policy acts on."""

    def grid(self, q_table: QTable | None) -> CellGrid | None:
        """The current cells, if it has some, with the values of a policy's table."""

    def random_action(self) -> Any:
        """A random action as JSON data."""

    def close(self) -> None:
        """Release it."""


def open_environment(spec: PlaySpec) -> PlayEnvironment:
    """The environment that a request names. `ConfigError` if it cannot be made."""
    return ScreenPlay(spec) if spec.task is not None else GymnasiumPlay(spec)


class GymnasiumPlay:
    """A Gymnasium environment that renders pictures."""

    def __init__(self, spec: PlaySpec) -> None:
        assert spec.env_id is not None
        self._env = make_rendering_env(spec.env_id, spec.parameters, spec.max_episode_steps)
        self.can_render = self._env.render_mode == "rgb_array"
        self._read_grid = grid_reader(self._env)
        self._observation: Any = None
        self._mask: list[int] | None = None
        fps = _read_fps(self._env.metadata)
        registered = self._env.spec
        self.description = EnvironmentDescription(
            env_id=spec.env_id,
            kind="gymnasium",
            parameters=spec.parameters,
            observation_space=space_json(self._env.observation_space),
            action_space=space_json(self._env.action_space),
            controls=controls_of(self._env, spec.env_id),
            turn_based=fps <= _TURN_BASED_FPS,
            fps=spec.fps or fps,
            max_episode_steps=registered.max_episode_steps if registered is not None else spec.max_episode_steps,
        )

    def reset(self, seed: int) -> None:
        """Begin an episode."""
        # Also seeds the space that random actions are drawn from.
        self._env.action_space.seed(seed)
        self._observation, info = self._env.reset(seed=seed)
        self._read_mask(info)

    def step(self, action: Any) -> Result:
        """Perform an action."""
        native = action_from_json(self._env.action_space, action)
        self._observation, reward, terminated, truncated, info = self._env.step(native)
        self._read_mask(info)
        success = info.get("is_success", info.get("success"))
        return Result(
            float(reward), bool(terminated), bool(truncated), None if success is None else bool(np.any(success))
        )

    def picture(self) -> EncodedPicture:
        """The rendered frame as JPEG."""
        if not self.can_render:
            return EncodedPicture()
        frame = self._env.render()
        picture = _to_rgb(frame)
        if picture is None:
            self.can_render = False
            shape = tuple(getattr(frame, "shape", ()))
            raise EnvironmentContractError(
                f"{self.description.env_id} rendered {type(frame).__name__} {shape or ''}, which is not an RGB image"
            )
        return encode_jpeg(picture)

    def policy_input(self) -> PolicyInput:
        """The observation as arrays."""
        return PolicyInput(flatten_observation(self._observation), action_mask=self._mask)

    def grid(self, q_table: QTable | None) -> CellGrid | None:
        """The cells of toy text environments and MiniGrid."""
        return None if self._read_grid is None else self._read_grid(q_table)

    def random_action(self) -> Any:
        """A sample of the action space that the mask allows."""
        space = self._env.action_space
        if self._mask is not None and isinstance(space, spaces.Discrete):
            return action_to_json(space.sample(mask=np.array(self._mask, np.int8)))
        return action_to_json(space.sample())

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _read_mask(self, info: Mapping[str, Any]) -> None:
        mask = info.get("action_mask")
        self._mask = None if mask is None else np.asarray(mask).reshape(-1).astype(int).tolist()


class ScreenPlay:
    """A task on a screen. Its actions are those of `sessions.action`."""

    def __init__(self, spec: PlaySpec) -> None:
        assert spec.task is not None
        self._task, self._parameters = spec.task, spec.parameters
        self._session = _open_session(spec.gateway)
        self._screenshot: Screenshot | None = None
        self._reward = 0.0
        self.description = EnvironmentDescription(
            env_id=spec.task,
            kind="screen",
            parameters=spec.parameters,
            controls=Controls(kind="screen"),
            turn_based=True,
            fps=spec.fps or _SCREEN_FPS,
        )

    def reset(self, seed: int) -> None:
        """Begin an episode on a new screen."""
        from palaestra.errors import SessionRefused

        try:
            task = self._session.reset(self._task, seed, **self._parameters)
        except SessionRefused as refusal:
            # What refuses it may have named the task already.
            reason = str(refusal).removeprefix(f"task = {self._task!r}: ").rstrip(".")
            remedy = "palaestra tasks lists them"
            raise ConfigError("task", self._task, reason.removesuffix(remedy).rstrip(". "), remedy) from None
        self._reward = 0.0
        self._screenshot = self._session.screenshot()
        self.description = replace(self.description, instruction=task.instruction, max_episode_steps=task.step_limit)

    def step(self, action: Any) -> Result:
        """Perform an action on the screen."""
        from palaestra.errors import InvalidAction
        from palaestra.sessions.action import decode

        try:
            step = self._session.act(decode(action))
        except InvalidAction as error:
            raise ConfigError(error.place, error.value, error.reason, error.remedy) from None
        self._screenshot = step.screenshot
        progress = step.progress
        reward, self._reward = progress.reward - self._reward, progress.reward
        is_over = progress.done
        return Result(reward, is_over and not progress.truncated, is_over and progress.truncated, progress.success)

    def picture(self) -> EncodedPicture:
        """The screen."""
        if self._screenshot is None:
            return EncodedPicture()
        return EncodedPicture(self._screenshot.data, self._screenshot.size.width, self._screenshot.size.height)

    def policy_input(self) -> PolicyInput:
        """The screen."""
        return PolicyInput(picture=self.picture().data)

    def grid(self, q_table: QTable | None) -> None:
        """None: a screen has no cells."""

    def random_action(self) -> Any:
        """A click at a random place."""
        assert self._screenshot is not None
        rng = np.random.default_rng()
        size = self._screenshot.size
        return {"kind": "click", "at": [int(rng.integers(size.width)), int(rng.integers(size.height))]}

    def close(self) -> None:
        """Close the session and its browser."""
        self._session.close()


def make_rendering_env(env_id: str, parameters: Mapping[str, Any], max_episode_steps: int | None) -> GymEnv:
    """A Gymnasium environment with `rgb_array` rendering if it offers that. `ConfigError` if it cannot be made."""
    from palaestra.env.make import base_env_id

    # A compiled environment steps many copies without pictures; the environment it copies has pictures.
    name = base_env_id(env_id)
    if "render_mode" in parameters:
        raise ConfigError("parameters.render_mode", parameters["render_mode"], "is set by the play", "Leave it out")
    try:
        return EnvFactory(name, {**parameters, "render_mode": "rgb_array"}, max_episode_steps)()
    except ConfigError as error:
        if error.place != "env.kwargs":
            raise _rename_place(error) from None
    try:
        # It may take no render mode at all.
        return EnvFactory(name, parameters, max_episode_steps)()
    except ConfigError as error:
        raise _rename_place(error) from None


def _rename_place(error: ConfigError) -> ConfigError:
    place = {"env.id": "env_id", "env.kwargs": "parameters"}.get(error.place, error.place)
    remedy = error.remedy.replace("env.kwargs", "parameters").replace("env.id", "env_id")
    return type(error)(place, error.value, error.reason, remedy)


def _open_session(gateway: str | None) -> BlockingSession:
    import os

    from palaestra.sessions.browser.browser import Browser
    from palaestra.sessions.browser.session import BrowserSession
    from palaestra.sessions.clients.blocking import BlockingSession
    from palaestra.sessions.clients.provider import TOKEN_VARIABLE
    from palaestra.sessions.session import Session

    if gateway is not None:
        return BlockingSession.through_gateway(gateway, token=os.environ.get(TOKEN_VARIABLE))
    browsers: list[Browser] = []

    async def open_browser_session() -> Session:
        browsers.append(await Browser.start())

        async def get_browser() -> Browser:
            return browsers[0]

        return BrowserSession(get_browser)

    async def stop_browser() -> None:
        for browser in browsers:
            await browser.stop()

    return BlockingSession(open_browser_session, on_close=stop_browser)


def _read_fps(metadata: Mapping[str, Any]) -> float:
    """The pace that an environment declares, or the default if it declares none that is possible."""
    fps: Any = metadata.get("render_fps")
    is_number = isinstance(fps, Real) and not isinstance(fps, bool)
    return float(fps) if is_number and _MIN_FPS <= fps <= _MAX_FPS else _DEFAULT_FPS


def _to_rgb(frame: object) -> NDArray[np.uint8] | None:
    """A rendered RGB, RGBA or grey image as RGB; None if it is something else."""
    if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8 or frame.ndim not in (2, 3) or not frame.size:
        return None
    image = frame if frame.ndim == 3 else frame[:, :, None]
    if image.shape[2] == 1:
        return np.repeat(image, 3, axis=2)
    return np.ascontiguousarray(image[:, :, :3]) if image.shape[2] in (3, 4) else None


def encode_jpeg(frame: NDArray[np.uint8]) -> EncodedPicture:
    """A frame (height, width, 3) as JPEG."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "JPEG", quality=_JPEG_QUALITY)
    return EncodedPicture(buffer.getvalue(), frame.shape[1], frame.shape[0])


def flatten_observation(observation: Any, name: str = "") -> dict[str, NDArray[Any]]:
    """The arrays of an observation; nested names are joined by `/`."""
    prefix = f"{name}/" if name else ""
    if isinstance(observation, Mapping):
        return {k: v for key, part in observation.items() for k, v in flatten_observation(part, prefix + key).items()}
    if isinstance(observation, tuple):
        parts = enumerate(observation)
        return {k: v for i, part in parts for k, v in flatten_observation(part, f"{prefix}{i}").items()}
    if isinstance(observation, str):
        return {name: np.frombuffer(observation.encode(), np.uint8)}
    return {name: np.asarray(observation)}


def action_from_json(space: Any, action: Any) -> Any:
    """The action of an environment from JSON data; `ConfigError` if it is not in the action space."""
    try:
        if isinstance(space, spaces.Discrete):
            native: Any = np.int64(action) if isinstance(action, int) and not isinstance(action, bool) else None
        elif isinstance(space, spaces.Dict):
            native = {key: action_from_json(part, action[key]) for key, part in space.spaces.items()}
        elif isinstance(space, spaces.Tuple):
            pairs = zip(space.spaces, action, strict=True)
            native = tuple(action_from_json(part, item) for part, item in pairs)
        else:
            native = np.asarray(action, space.dtype).reshape(space.shape)
            if isinstance(space, spaces.Box):
                native = np.clip(native, space.low, space.high)
    except (TypeError, ValueError, KeyError, OverflowError):
        native = None
    if native is None or not space.contains(native):
        raise ConfigError("action", action, f"is not an action of {space}")
    return native


def action_to_json(action: Any) -> Any:
    """An action of an environment as JSON data."""
    if isinstance(action, Mapping):
        return {str(key): action_to_json(part) for key, part in action.items()}
    if isinstance(action, tuple):
        return [action_to_json(part) for part in action]
    return np.asarray(action).tolist()
