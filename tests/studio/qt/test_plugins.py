"""What other packages add appears in the window without any code of the studio: runners and environments."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from tests.runs.runners import example_runner
from tests.runs.runners.test_registry import install
from tests.runs.serving import SETTINGS

from palaestra.files.home import Home
from palaestra.runs.client.client import TrainerService

ENVIRONMENT = """
import gymnasium, numpy as np

class Maze(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None, corridors: int = 3):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 1.0, False, False, {}

    def render(self):
        return np.zeros((16, 16, 3), np.uint8)

def register():
    gymnasium.register("Maze-v3", entry_point="maze_package:Maze", max_episode_steps=50)
"""


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A client of a service whose interpreter has two more packages."""
    base = tmp_path_factory.mktemp("plugins")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(base / "venv")], check=True)
    (site,) = (base / "venv").glob("lib/python3*/site-packages")
    source = Path(__file__).parents[3] / "src"
    (site / "ours.pth").write_text(f"{source}\n{sysconfig.get_paths()['purelib']}\n")
    install(site, "example", Path(example_runner.__file__).read_text() + "\n    Runner = ExampleRunner\n")
    install(site, "maze", ENVIRONMENT)
    points = site / "maze_package-1.0.dist-info" / "entry_points.txt"
    points.write_text("[palaestra.environments]\nmaze = maze_package:register\n")
    home = Home(base / "var" / "training")
    command = [base / "venv" / "bin" / "python", "-m", "palaestra.runs.service.server", json.dumps(SETTINGS)]
    environment = {**os.environ, "PALAESTRA_HOME": str(home.base)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert "url" in json.loads(process.stdout.readline())
        yield TrainerService(home)
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


def test_a_runner_and_an_environment_of_other_packages_can_be_found_played_and_configured(open_window):
    driver = open_window()
    session, training = driver.studio.session, driver.studio.training
    (maze,) = [one for one in session.environments.all if one.env_id == "Maze-v3"]
    assert (maze.group, maze.installed, maze.max_episode_steps) == ("Maze package", True, 50)
    assert session.environments.search("maze")[0] == maze
    driver.window.show_page("play")
    session.set_mode("agent")
    driver.window.session_dock.show_purpose("train")
    driver.wait(lambda: training.launch.readiness.get("example") is not None)
    driver.settle()
    cards = driver.window.train_panel.catalogue._cards
    names = [cards.itemAt(i).widget().accessibleName() for i in range(cards.count())]
    assert "Trainer example" in names
    training.choose_runner("example")
    driver.wait(lambda: training.launch.draft.has_schema)
    driver.settle()
    assert driver.window.train_panel.form.editor("steps") is not None
    session.choose_environment("Maze-v3")
    driver.wait(lambda: session.environments.form.find_field("corridors") is not None)
    assert session.environments.form.find_field("corridors").default == 3
    session.start(checkpoint="random")
    driver.wait(lambda: session.play.last_step is not None and session.play.last_step.actor == "agent")
