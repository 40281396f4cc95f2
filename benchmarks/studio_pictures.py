"""Pictures of the studio in its states, dark and light, from a real service and real runs. Written to docs/images/."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")

from PySide6.QtCore import QSize
from PySide6.QtWidgets import QApplication

from palaestra.errors import LaunchRefused
from palaestra.files.home import Home
from palaestra.runs.client.client import TrainerService
from palaestra.runs.phase import Phase
from palaestra.runs.spec import RunSpec
from palaestra.studio.model.launch import starting_point
from palaestra.studio.model.settings import Settings
from palaestra.studio.qt.application import create_window, wait_until
from palaestra.studio.qt.pages.trajectories_page import TrajectoriesPage
from palaestra.studio.qt.window import StudioWindow

IMAGES = Path(__file__).parents[1] / "docs" / "images"
_SIZE = QSize(1440, 900)
_TIMEOUT_S, _SETTLE_S = 120.0, 15.0
"""The page of a run that goes on never settles."""
_CARTPOLE = starting_point("palaestra", "CartPole-v1")
_LAKE = "FrozenLake8x8-v1"


@contextlib.contextmanager
def start_service(home: Home) -> Iterator[None]:
    """A service process of its own, which ends with the block."""
    settings = json.dumps({"min_free_disk_mb": 0, "port": 0})
    process = subprocess.Popen(
        [sys.executable, "-m", "palaestra.runs.service.server", settings],
        stdout=subprocess.PIPE,
        env={**os.environ, "PALAESTRA_HOME": str(home.base)},
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield
    finally:
        process.terminate()
        process.wait()


class Photographer:
    """Opens a window for each picture and saves it in both themes."""

    def __init__(self, service: TrainerService, only: str) -> None:
        self._service, self._only = service, only

    def take(
        self, name: str, prepare: Callable[[StudioWindow], None], page: str = "play", *, again: bool = False
    ) -> None:
        """Show a page, bring it into a state, and save it as `studio-<name>[-light].png`.

        `again`: prepare it again after the change of the theme, which builds the window anew.
        """
        if self._only not in name:
            return
        window = create_window(self._service, Settings(None), "dark")
        try:
            window.resize(_SIZE)
            window.show_page(page)
            window.show()
            wait_for(lambda: window.studio.connection.is_connected and window.studio.browser.runs.is_loaded)
            prepare(window)
            wait_until(window.is_settled, _SETTLE_S)
            window.grab().save(str(IMAGES / f"studio-{name}.png"))
            window.change_theme()
            if again:
                prepare(window)
            wait_until(window.is_settled, _SETTLE_S)
            window.grab().save(str(IMAGES / f"studio-{name}-light.png"))
        finally:
            window.close()
            window.deleteLater()
            QApplication.processEvents()
        print(f"studio-{name}.png", flush=True)


def wait_for(condition: Callable[[], object]) -> None:
    """Let the window live until a condition holds."""
    if not wait_until(lambda: bool(condition()), _TIMEOUT_S):
        print("  (not settled in time)", flush=True)


def train(service: TrainerService) -> list[str]:
    """Four runs that succeed: three seeds and another learning rate."""
    slower = {**_CARTPOLE, "algorithm": {**_CARTPOLE["algorithm"], "learning_rate": 2e-5}}
    specs = [RunSpec(env_id="CartPole-v1", seed=seed, config=_CARTPOLE, tags=("baseline",)) for seed in (1, 2, 3)]
    specs.append(RunSpec(env_id="CartPole-v1", seed=1, config=slower, name="slower-learning"))
    run_ids = [service.submit(spec).run_id for spec in specs]
    for run_id in run_ids:
        assert service.wait(run_id, timeout_s=600).phase is Phase.SUCCEEDED
    return run_ids


def train_on_screens(service: TrainerService) -> str:
    """A short run of the tiny model, for its trajectories."""
    config = {
        "model": {"name": "tiny", "max_new_tokens": 24, "history": 0},
        "tasks": [{"task": "click_target/button", "params": {"difficulty": 2, "step_limit": 1}}],
        "trainer": {"batch_size": 16, "num_training_steps": 2, "microbatch_turns": 16},
        "actor": {"max_steps_per_episode": 3},
        "actor_pool": {"target_concurrent_actors": 4},
    }
    run_id = service.submit(RunSpec(script="grpo", name="click-target", config=config)).run_id
    service.wait(run_id, timeout_s=600)
    return run_id


def train_table(service: TrainerService) -> str:
    """A table that has learned the frozen lake; returns its checkpoint."""
    config = starting_point("palaestra", _LAKE, "q_learning")
    run_id = service.submit(RunSpec(env_id=_LAKE, script="q_learning", name="lake", config=config)).run_id
    assert service.wait(run_id, timeout_s=600).phase is Phase.SUCCEEDED
    return service.checkpoints(run=run_id)[0].checkpoint_id


def create_datasets() -> None:
    """Two small datasets of different environments."""
    for name, env_id in (("cartpole/random-v0", "CartPole-v1"), ("pendulum/random-v0", "Pendulum-v1")):
        create = [sys.executable, "-m", "palaestra", "datasets", "create", name, "--env", env_id]
        subprocess.run([*create, "--steps", "2000", "--score-episodes", "0"], check=True, stdout=subprocess.DEVNULL)


def play(window: StudioWindow, env_id: str, mode: str, steps: int, checkpoint: str | None = None) -> None:
    """Play a few steps."""
    session = window.studio.session
    session.choose_environment(env_id)
    session.set_mode(mode)  # type: ignore[arg-type]
    session.start(checkpoint=checkpoint)
    wait_for(lambda: len(session.play.steps) >= steps or (session.play.state and session.play.state.waiting))


def main() -> None:
    """Take every picture, or those whose name contains the first argument."""
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder) / "var" / "training")
        os.environ["PALAESTRA_HOME"] = str(home.base)
        with start_service(home):
            take_all(TrainerService(home), only)


def take_all(service: TrainerService, only: str) -> None:
    """The states in the order in which a user meets them."""
    photographer = Photographer(service, only)
    photographer.take("empty", lambda window: None, "welcome")
    photographer.take("no-runs", lambda window: None, "runs")
    photographer.take("human", lambda window: play(window, "CartPole-v1", "human", 1))
    photographer.take("grid", lambda window: play(window, "FrozenLake-v1", "agent", 8, "random"))
    take_tables(service, photographer, only)
    run_ids = train(service)
    checkpoint = service.checkpoints(run=run_ids[0])[0].checkpoint_id

    def play_trained(window: StudioWindow) -> None:
        window.studio.browser.show(run_ids[0])
        window.commands.get("view.right").perform()
        window.studio.session.choose_environment("CartPole-v1")
        window.studio.session.set_mode("agent")
        window.session_dock.show_purpose("trained")
        window.studio.session.start(checkpoint=checkpoint)
        wait_for(lambda: len(window.studio.session.play.steps) >= 120)

    photographer.take("play", play_trained)
    photographer.take("train", lambda window: window.open_page("train"))
    photographer.take("commands", lambda window: window.open_page("commands"))
    photographer.take("shortcuts", lambda window: window.open_page("shortcuts"))

    def compare(window: StudioWindow) -> None:
        window.studio.browser.choose(run_ids)
        window.studio.browser.charts.set_options(grouped=True)

    photographer.take("compare", compare, "runs")

    def replay(window: StudioWindow) -> None:
        window.open_page("episodes")
        wait_for(lambda: window.is_settled() and window.studio.episodes.replay.record is not None)
        window.studio.episodes.replay.seek(250)

    photographer.take("replay", replay, "episodes")
    failed = service.submit(RunSpec(runner="echo", name="diverges", config={"steps": 400, "then": "traceback"}))
    service.wait(failed.run_id, timeout_s=60)
    photographer.take("failed", lambda window: window.studio.browser.show(failed.run_id), "runs")
    lander = starting_point("palaestra", "LunarLander-v3")
    lander = {**lander, "trainer": {**lander["trainer"], "total_timesteps": 50_000_000}}
    running = service.submit(RunSpec(env_id="LunarLander-v3", name="lander", seed=1, config=lander))
    wait_for(lambda: (service.run(running.run_id).env_step or 0) > 100_000)
    photographer.take("running", lambda window: window.studio.browser.show(running.run_id), "runs")
    service.stop_run(running.run_id)
    service.wait(running.run_id, timeout_s=60)

    if only in "trajectories":
        train_on_screens(service)

        def look(window: StudioWindow) -> None:
            window.open_page("trajectories")
            page = window.pages["trajectories"]
            assert isinstance(page, TrajectoriesPage)
            wait_for(lambda: window.is_settled() and page.list.count() > 0)
            page.list.setCurrentRow(1)

        photographer.take("trajectories", look, "trajectories")


def take_tables(service: TrainerService, photographer: Photographer, only: str) -> None:
    """Values on the cells, the mind of a BDI agent, and the choice of a dataset."""
    if only in "values":
        checkpoint = train_table(service)

        def show_values(window: StudioWindow) -> None:
            steps = window.studio.session.play.steps
            play(window, _LAKE, "agent", 1, checkpoint)
            window.session_dock.show_purpose("trained")
            wait_for(lambda: any(step.step >= 12 and step.grid and step.grid.values for step in steps))

        photographer.take("values", show_values)
    if only in "beliefs":
        take_beliefs(service, photographer)
    if only in "datasets":
        create_datasets()

        def choose_dataset(window: StudioWindow) -> None:
            window.open_page("train")
            training = window.studio.training
            wait_for(lambda: training.launch.draft.has_schema)
            training.choose_script("iql")
            wait_for(lambda: training.launch.draft.has_schema and training.datasets.all)
            training.launch.edit("dataset.id", "cartpole/random-v0")

        photographer.take("datasets", choose_dataset)


def take_beliefs(service: TrainerService, photographer: Photographer) -> None:
    """What a BDI agent believes while it walks."""
    spec = RunSpec(runner="spade-bdi", name="walker", env_id=_LAKE, seed=1, config={"episodes": 400})
    try:
        run_id = service.submit(spec).run_id
    except LaunchRefused as error:  # its environment is installed from the package index
        print(f"studio-beliefs.png is left out: {error}", flush=True)
        return
    wait_for(lambda: len(service.beliefs(run_id).records) > 12)

    def show_beliefs(window: StudioWindow) -> None:
        if not window.telemetry_dock.isVisible():
            window.commands.get("view.right").perform()
        window.studio.browser.show(run_id)
        wait_for(lambda: window.studio.shows_beliefs and len(window.studio.browser.beliefs) > 12)
        dock = window.telemetry_dock
        dock.tabs.setCurrentWidget(dock.beliefs)

    photographer.take("beliefs", show_beliefs, again=True)
    service.stop_run(run_id)


if __name__ == "__main__":
    main()
