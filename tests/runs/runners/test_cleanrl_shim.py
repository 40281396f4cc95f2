"""The behaviour that the shim restores with Gymnasium 1, tested in a fresh interpreter."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from palaestra.runs.runners.cleanrl import RENAMED, SHIM

PLAY = """
import json, sys
import gymnasium as gym, numpy as np
class Counting(gym.Env):
    observation_space = gym.spaces.Box(-100, 100, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def __init__(self, length): self.length, self.t = length, 0
    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {"begun": 1}
    def step(self, action):
        self.t += 1
        return np.full(1, self.t, np.float32), 2.0, self.t == self.length, False, {"t": self.t}
make = lambda length: lambda: gym.wrappers.RecordEpisodeStatistics(Counting(length))
"""


def _run_python(code, *, search=(), shim=True):
    path = [str(SHIM.parent)] if shim else []
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PLAY + code], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": ":".join([*path, *search])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_ended_episode_is_told_in_the_step_it_ends_as_0_29_told_it():
    output = _run_python("""
envs = gym.vector.SyncVectorEnv([make(2), make(3)])
envs.reset(seed=0)
results = []
for _ in range(3):
    obs, reward, terminated, truncated, infos = envs.step(np.zeros(2, int))
    final = infos.get("final_info")
    results.append([
        obs.tolist(), terminated.tolist(),
        None if final is None else [None if f is None else [f["t"], repr(f["episode"]["r"]), f["episode"]["l"].tolist()]
                                    for f in final],
        [None if o is None else o.tolist() for o in infos["final_observation"]] if final is not None else None,
        infos["_final_info"].tolist() if final is not None else None,
    ])
print(json.dumps(results))
""")

    assert output == [
        [[[1.0], [1.0]], [False, False], None, None, None],
        [
            [[0.0], [2.0]], [True, False], [[2, "array([4.], dtype=float32)", [2]], None], [[2.0], None], [True, False],
        ],
        [
            [[1.0], [0.0]], [False, True], [None, [3, "array([6.], dtype=float32)", [3]]], [None, [3.0]], [False, True],
        ],
    ]  # fmt: skip


@pytest.mark.parametrize("shim", [True, False])
def test_a_script_that_chose_how_to_reset_keeps_its_choice(shim):
    output = _run_python(
        """
envs = gym.vector.SyncVectorEnv([make(1)], autoreset_mode=gym.vector.AutoresetMode.NEXT_STEP)
envs.reset()
infos = envs.step(np.zeros(1, int))[-1]
print(json.dumps([sorted(infos), envs.metadata["autoreset_mode"].value]))
""",
        shim=shim,
    )

    assert output == [["_episode", "_t", "episode", "t"], "NextStep"]


def test_an_observation_may_be_transformed_without_naming_a_space():
    output = _run_python("""
env = gym.wrappers.TransformObservation(Counting(3), lambda seen: seen + 5)
print(json.dumps([env.reset()[0].tolist(), env.observation_space == Counting.observation_space]))
""")

    assert output == [[5.0], True]


def test_the_sitecustomize_it_hides_still_runs(tmp_path):
    Path(tmp_path / "sitecustomize.py").write_text("import sys\nsys.hidden_one = True\n")

    assert _run_python("print(json.dumps(sys.hidden_one))", search=[str(tmp_path)]) is True


def test_a_program_that_does_not_use_gymnasium_does_not_load_it():
    done = subprocess.run(
        [sys.executable, "-c", "import sys; print('gymnasium' in sys.modules or 'numpy' in sys.modules)"],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(SHIM.parent)},
    )  # fmt: skip
    assert done.stdout == "False\n"


def test_wrappers_that_were_renamed_have_their_old_names_too():
    output = _run_python("""
import importlib.resources
stacked = gym.wrappers.FrameStack(Counting(3), 4)
print(json.dumps([
    np.asarray(stacked.reset()[0]).shape, gym.wrappers.GrayScaleObservation.__name__,
    importlib.resources.files("gymnasium").joinpath("py.typed").is_file(),
]))
""")

    assert output == [[4, 1], "GrayscaleObservation", True]


def test_the_names_that_preflight_expects_of_it_are_those_it_brings():
    spec = importlib.util.spec_from_file_location("the_shim", SHIM)
    shim = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shim)

    assert shim.RENAMED == RENAMED


def test_a_recorder_that_wandb_closes_in_its_own_way_can_be_closed(tmp_path):
    (tmp_path / "moviepy.py").write_text("")
    output = _run_python(
        f"""
Recorder = gym.wrappers.RecordVideo
close = Recorder.close
def closed(self):  # as wandb.integration.gym does with monitor_gym=True
    close(self)
    if not self.enabled:
        return
    raise AssertionError(self.path)
Recorder.close = closed
class Drawn(Counting):
    metadata = {{"render_modes": ["rgb_array"], "render_fps": 30}}
    render_mode = "rgb_array"
Recorder(Drawn(3), {str(tmp_path / "videos")!r}, episode_trigger=lambda _: False).close()
print(json.dumps("closed"))
""",
        search=[str(tmp_path)],
    )

    assert output == "closed"


def test_the_environments_of_an_installed_ale_py_are_registered(tmp_path):
    (tmp_path / "ale_py.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Pretended-v4', entry_point='gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    output = _run_python("print(json.dumps('Pretended-v4' in gym.registry))", search=[str(tmp_path)])

    assert output is True
