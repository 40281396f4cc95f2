"""Foreign tags and our names."""

import math

import pytest
from benchmarks.reference import documented_metrics

from palaestra.runs.ingest.trainer_formats import EPISODE_TAGS, TAGS, EpisodePairing, PendingEpisode, provenance
from palaestra.runs.ingest.translation_state import Thinning
from palaestra.runs.runner import EventFiles, JournalFile, StdoutLines
from palaestra.telemetry.event import EpisodeSummary

RETURN, LENGTH = EPISODE_TAGS["cleanrl"]


@pytest.mark.parametrize("table", TAGS)
def test_every_tag_becomes_a_metric_that_is_explained_and_no_two_become_the_same(table):
    assert set(TAGS[table].values()) <= set(documented_metrics())
    assert len(set(TAGS[table].values())) == len(TAGS[table])


def test_an_unknown_tag_keeps_its_name():
    assert TAGS["cleanrl"].get("losses/qf1_loss", "losses/qf1_loss") == "losses/qf1_loss"
    assert TAGS["cleanrl"].get("losses/clipfrac", "losses/clipfrac") == "clip_fraction"


def test_every_curve_can_say_where_it_comes_from():
    cleanrl = (EventFiles("runs/**/events*", "cleanrl"), StdoutLines("cleanrl"))
    assert provenance(cleanrl, "clip_fraction") == "tensorboard:losses/clipfrac"
    assert provenance(cleanrl, "losses/q_values") == "tensorboard:losses/q_values"
    assert provenance(cleanrl, "episode/return") == "tensorboard:charts/episodic_return"
    assert provenance(cleanrl, "episode/length") == "tensorboard:charts/episodic_length"
    assert provenance((StdoutLines("sb3"),), "loss") == "stdout:train/loss"
    assert provenance((StdoutLines("events"),), "loss") == "stdout:loss"
    assert provenance((JournalFile(),), "loss") == "journal"


def test_a_return_and_the_length_behind_it_are_an_episode():
    pairing = EpisodePairing(EPISODE_TAGS["cleanrl"])
    assert pairing.add(RETURN, 10, 5.0, 1.0) == []
    assert pairing.add("charts/SPS", 10, 5.0, 1.0) is None
    assert pairing.add(LENGTH, 10, 7.0, 1.5) == [(EpisodeSummary(10, 0, 0, 5.0, 7), 1.0)]
    assert pairing.pending is None


def test_environments_that_end_at_the_same_step_are_kept_apart():
    pairing = EpisodePairing(EPISODE_TAGS["cleanrl"])
    found = []
    for tag, value in ((RETURN, 1.0), (LENGTH, 11.0), (RETURN, 2.0), (LENGTH, 12.0)):
        found += pairing.add(tag, 10, value, 0.0)
    assert [(episode.episode_return, episode.length) for episode, _ in found] == [(1.0, 11), (2.0, 12)]


def test_a_return_without_a_length_is_still_an_episode():
    pairing = EpisodePairing(EPISODE_TAGS["cleanrl"], PendingEpisode(5, 9.0, 2.0))
    assert pairing.add(LENGTH, 6, 3.0, 2.0) == [(EpisodeSummary(5, 0, 0, 9.0, 0), 2.0)]
    assert pairing.add(RETURN, 7, 1.0, 3.0) == []
    assert pairing.add(RETURN, 8, 2.0, 4.0) == [(EpisodeSummary(7, 0, 0, 1.0, 0), 3.0)]
    assert pairing.add(LENGTH, 8, math.nan, 4.0) == [(EpisodeSummary(8, 0, 0, 2.0, 0), 4.0)]
    assert pairing.flush() == []


def test_thinning_keeps_the_first_value_of_every_stretch_metric_by_metric():
    thinning = Thinning(100)
    steps = [0, 1, 99, 100, 150, 340, 341, 250]
    assert [thinning.keeps("a", step) for step in steps] == [True, False, False, True, False, True, False, True]
    assert thinning.keeps("b", 341)
    assert not Thinning(100, thinning.last_kept).keeps("b", 399)


def test_without_thinning_everything_is_kept_and_nothing_remembered():
    thinning = Thinning(1)
    assert all(thinning.keeps("a", 5) for _ in range(3))
    assert thinning.last_kept == {}


def test_thinning_remembers_no_more_than_two_thousand_metrics():
    thinning = Thinning(10)
    assert all(thinning.keeps(str(number), 0) for number in range(3_000))
    assert len(thinning.last_kept) == 2_000
