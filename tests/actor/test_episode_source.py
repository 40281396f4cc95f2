"""Batches of episodes: they keep what the training loop relies on, whoever plays."""

import pytest
from tests.experience.episodes import episode

from palaestra.actor.episode_source import EpisodeScheduler, EpisodeSource, PlayedEpisode, Player
from palaestra.errors import CollectorFailed
from palaestra.experience.trajectory import Outcome
from palaestra.sessions.task_sampler import SamplerConfig, TaskChoice, TaskSampler
from palaestra.transport.conformance import check_source


class Fake(Player):
    """Plays by making up what happened."""

    def __init__(self, requests, outcome="success"):
        super().__init__(None, requests)
        self.requests, self.outcome, self.room, self.version, self.closed = requests, outcome, 0, 0, False

    def take(self, need, stop):
        ordered = [self.requests.next() for _ in range(need)]
        return [
            PlayedEpisode(one, episode(episode_id=one.episode_id, outcome=Outcome(self.outcome), group=one.group))
            for one in ordered
        ]

    def allow_more(self, count):
        self.room += count

    def set_version(self, version):
        self.version = version

    def close(self):
        self.closed = True


def source(outcome="success", group_size=1, admit=list, **settings):
    sampler = TaskSampler([TaskChoice(task="fake/button")], SamplerConfig(), seed=0)
    requests = EpisodeScheduler(sampler, group_size=group_size, seed=0)
    made = EpisodeSource(requests, admit, batch_size=4, **settings)
    made.open(Fake(requests, outcome), version=0)
    return made


@pytest.mark.parametrize("group_size", [1, 2])
def test_it_is_a_source_like_the_others(group_size):
    check_source(lambda: source(group_size=group_size))


def test_a_batch_that_changed_nothing_makes_room_for_as_many_episodes():
    made = source()
    player = made._player
    made.release(made.next_batch(), 0)  # the version is what it was
    assert player.room == 4
    made.release(made.next_batch(), 1)
    assert player.room == 4
    assert player.version == 1


def test_with_groups_what_is_not_admitted_is_played_again_three_times_and_then_given_up():
    made = source(group_size=2, admit=lambda group: [])
    assert made.next_batch().experience == []
    assert made.progress.episodes == 16  # a batch of 4, and three refills
    assert made._player.room == 16


def test_three_batches_of_broken_screens_end_the_run():
    made = source(outcome="environment_failed", sessions="The gateway")
    for version in (1, 2):
        made.release(made.next_batch(), version)
    with pytest.raises(CollectorFailed, match=r"every session failed in 3 consecutive batches, 4 in .* The gateway"):
        made.next_batch()


def test_without_a_player_it_says_what_to_do():
    made = source()
    made.close()
    with pytest.raises(CollectorFailed, match=r"Call open\(player\)"):
        made.next_batch()
