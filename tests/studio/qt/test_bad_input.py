"""Plays that go wrong: environments that raise or draw nothing, policies for other spaces, damaged recordings."""

import json

import pytest

from palaestra.runs.phase import Phase
from palaestra.runs.spec import RunSpec

ENVIRONMENTS = '''
"""Environments with one fault each."""
import gymnasium, numpy as np

class Faulty(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def __init__(self, render_mode=None, fault="step"):
        self.render_mode, self.fault, self.count, self.resets = render_mode, fault, 0, 0

    def reset(self, *, seed=None, options=None):
        self.resets += 1
        if self.fault == "reset" and self.resets == 2:
            raise RuntimeError("the level cannot be built")
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        if self.fault == "step" and self.count == 3:
            raise ZeroDivisionError("the simulator broke")
        return np.zeros(1, np.float32), 1.0, self.fault == "reset" and self.count == 3, False, {}

    def render(self):
        return None if self.fault == "blind" else np.zeros((8, 8, 3), np.uint8)
'''


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """The directory of a module with faulty environments."""
    directory = tmp_path_factory.mktemp("own")
    (directory / "faulty_env.py").write_text(ENVIRONMENTS)
    return directory


@pytest.fixture
def driver(open_window, faulty, monkeypatch):
    monkeypatch.chdir(faulty)
    driver = open_window()
    driver.window.show_page("play")
    return driver


def start_faulty(driver, fault):
    session = driver.studio.session
    session.choose_environment("faulty_env:Faulty")
    driver.wait(lambda: driver.studio.feed.is_idle)
    # The probe of parameters does not look into the directory of the studio; the worker of the play does.
    session.environments.set_schema(
        "faulty_env:Faulty",
        {
            "type": "object",
            "properties": {"fault": {"type": "string", "default": "step"}},
            "additionalProperties": False,
        },
    )
    session.environments.edit("fault", fault)
    session.set_mode("human")
    session.start()


@pytest.mark.parametrize(
    ("fault", "text"),
    [("step", "ZeroDivisionError: the simulator broke"), ("reset", "RuntimeError: the level cannot be built")],
)
def test_an_environment_that_raises_ends_the_play_with_one_notice_and_the_steps_are_kept(driver, fault, text):
    start_faulty(driver, fault)
    session = driver.studio.session
    driver.wait(lambda: session.play.ended is not None)
    notices = [notice for notice in driver.studio.notices.history if notice.level == "error"]
    assert [notice.text for notice in notices if text not in notice.text] == []
    assert len(notices) == 1
    assert notices[0].action == "Start again"
    assert session.play.last_step.step == (2 if fault == "step" else 3)
    play_id = session.play.play_id
    driver.wait(lambda: any(one.play_id == play_id for one in driver.studio.episodes.episodes.visible()))
    record = next(one for one in driver.studio.episodes.episodes.visible() if one.play_id == play_id)
    assert record.steps == (2 if fault == "step" else 3)
    notices[0].perform()
    driver.wait(lambda: session.play.play_id not in ("", play_id) and session.play.last_step is not None)


def test_an_environment_that_draws_nothing_is_explained_in_the_page_and_another_can_be_played(driver):
    start_faulty(driver, "blind")
    session, empty = driver.studio.session, driver.window.play_page._empty
    driver.wait(lambda: session.play.problem != "")
    driver.wait(lambda: empty.isVisible() and "rendered nonetype" in empty.text.text().lower())
    session.choose_environment("CartPole-v1")
    session.start()
    driver.wait(lambda: session.play.last_step is not None and session.play.problem == "")


def test_a_policy_for_other_spaces_is_refused_and_the_play_goes_on(driver, client):
    config = {"env": {"num_envs": 2}, "trainer": {"total_timesteps": 256, "rollout_length": 64}}
    run_id = client.submit(RunSpec(env_id="CartPole-v1", seed=1, config=config)).run_id
    assert client.wait(run_id, timeout_s=120).phase is Phase.SUCCEEDED
    checkpoint = client.checkpoints(run=run_id)[0].checkpoint_id
    session = driver.studio.session
    session.choose_environment("Pendulum-v1")
    session.set_mode("agent")
    session.start(checkpoint="random")
    driver.wait(lambda: session.play.last_step is not None and session.play.last_step.actor == "agent")
    driver.studio.library.activate(checkpoint)
    status = driver.studio.library.checkpoints
    driver.wait(lambda: status.activating is not None and status.activating.state == "failed")
    assert "CartPole-v1" in status.activating.text
    step = session.play.last_step.step
    driver.wait(lambda: session.play.last_step.step != step)
    assert session.play.is_open


def record_episode(driver):
    """A finished recording of a few steps; returns its record."""
    session = driver.studio.session
    session.choose_environment("CartPole-v1")
    session.set_mode("agent")
    session.start(checkpoint="random")
    driver.wait(lambda: any(step.is_last for step in session.play.steps))
    session.end()
    play_id = session.play.play_id

    def finished():
        episodes = driver.studio.episodes.episodes.visible()
        return [one for one in episodes if one.play_id == play_id and one.outcome == "terminated"]

    driver.wait(finished)
    return finished()[0]


def test_a_damaged_recording_is_listed_with_its_problem_and_can_be_deleted(driver, module_home):
    damaged = module_home.episodes / "damaged-1"
    damaged.mkdir(parents=True)
    (damaged / "episode.json").write_text("nonsense")
    library, page = driver.studio.episodes, driver.window.pages["episodes"]
    driver.window.show_page("episodes")
    library.refresh()
    driver.wait(lambda: any(one.problem for one in library.episodes.visible()))
    record = next(one for one in library.episodes.visible() if one.problem)
    driver.wait(lambda: record in [page.list.item(i).data(256) for i in range(page.list.count())])
    row = next(i for i in range(page.list.count()) if page.list.item(i).data(256) == record)
    page.list.setCurrentRow(row)
    driver.wait(lambda: library.replay.record == record)
    assert library.replay.problem == "episode.json cannot be read"
    driver.click(page.player._delete)
    driver.click(page.player._delete)
    driver.wait(lambda: record not in library.episodes.visible())
    assert not damaged.exists()


def test_a_recording_with_a_broken_step_or_picture_is_explained_and_others_are_still_shown(driver, module_home):
    record = record_episode(driver)
    library = driver.studio.episodes
    driver.window.show_page("episodes")
    directory = module_home.episodes / record.episode_id
    pictures = next(directory.glob("pictures*"))
    pictures.write_bytes(b"\0" * pictures.stat().st_size)
    library.open(record)
    driver.wait(lambda: library.replay.problem != "")
    assert "picture" in library.replay.problem
    lines = (directory / "steps.jsonl").read_text().splitlines()
    (directory / "steps.jsonl").write_text("\n".join([lines[0], "{broken", *lines[2:]]) + "\n")
    library.open(record)
    driver.wait(lambda: "Line 2 of steps.jsonl" in library.replay.problem)
    document = json.loads((directory / "episode.json").read_text())
    assert document["outcome"] == "terminated"
    library.delete(record.episode_id)
    driver.wait(lambda: record not in library.episodes.visible())
