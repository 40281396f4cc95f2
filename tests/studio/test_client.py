"""What the studio needs of the client of the run service."""

import pytest

from palaestra.errors import ConfigError
from palaestra.runs.client.client import TrainerService
from palaestra.runs.play.state import EpisodeStep, StepReport
from palaestra.runs.wire import to_json


class EpisodeService(TrainerService):
    """A service with one episode, that sends at most 10,000 steps at once."""

    def __init__(self, count):
        self.rows = [to_json(EpisodeStep(StepReport(episode=1, step=i), has_picture=False)) for i in range(count)]

    def request(self, method, path, body=None, *, first, count):
        assert count <= 10_000
        return self.rows[first : first + count]


@pytest.mark.parametrize("length", [1, 10_000, 20_001])
def test_all_steps_of_an_episode_are_read_in_pages(length):
    steps = EpisodeService(length).episode_steps("e1")
    assert [one.report.step for one in steps] == list(range(length))


def test_a_part_of_an_episode_is_read_across_pages():
    steps = EpisodeService(20_000).episode_steps("e1", 5, 12_000)
    assert [one.report.step for one in steps] == list(range(5, 12_005))


def test_a_preset_whose_name_has_a_slash_is_refused():
    with pytest.raises(ConfigError, match="contains a slash"):
        TrainerService(url="http://localhost:1").save_preset("train/sb3", "dqn/fast", {})
    with pytest.raises(ConfigError, match="contains a slash"):
        TrainerService(url="http://localhost:1").delete_preset("train/sb3", "dqn/fast")
