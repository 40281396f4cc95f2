"""Several engines: episodes stay with theirs, move when it is lost, and old adapters go when nothing uses them."""

import json
import signal
import subprocess
import sys
import threading
from concurrent.futures import wait

import pytest
from tests.policy.vlm.serving.conftest import MODEL, move, picture, request, tokens

from palaestra.errors import CollectorFailed
from palaestra.policy.vlm import Conversation, PastTurn
from palaestra.policy.vlm.sampler import ReplyRequest
from palaestra.policy.vlm.serving.small_server import SmallServer


@pytest.fixture
def second():
    with SmallServer(MODEL) as server:
        yield server


def play(sampler, number, turns):
    """An episode of several turns: each prompt begins with the one before and its reply."""
    past, replies = [], []
    for turn in range(turns):
        now = picture(turn)
        conversation = Conversation("", "Click.", tuple(past), now)
        (reply,) = sampler.sample(
            [ReplyRequest(conversation, 7 * number + turn, episode=f"e{number}")], temperature=1.0
        )
        past.append(PastTurn(now, reply.completion.token_ids, reply.completion.text))
        replies.append(reply)
    return replies


def test_all_turns_of_an_episode_go_to_one_engine_and_the_episodes_to_both(connect, policy, server, second):
    sampler = connect(server.url, second.url)
    sampler.publish(1, policy.trainable_state())
    for one in (server, second):
        one.served.clear()
    for number in range(8):
        first, then = play(sampler, number, 2)
        prefix = [*first.prompt.ids.tolist(), *first.completion.token_ids.tolist()]
        assert then.prompt.ids.tolist()[: len(prefix)] == prefix
    episodes = [{one.session for one in engine.served} for engine in (server, second)]
    assert not episodes[0] & episodes[1]
    assert len(episodes[0] | episodes[1]) == 8
    assert all(episodes)
    assert sampler.counts.moved == set()


def test_the_episodes_of_a_lost_engine_move_to_the_other_and_are_counted(connect, policy, server):
    second = SmallServer(MODEL)
    sampler = connect(server.url, second.url)
    sampler.publish(1, policy.trainable_state())
    requests = [request(number) for number in range(8)]
    before = tokens(sampler.sample(requests, temperature=1.0))
    own = {one.session for one in second.served} & {one.episode for one in requests}
    assert own
    second.close()
    move(policy, seed=9)
    sampler.publish(2, policy.trainable_state())
    after = sampler.sample(requests, temperature=1.0)
    assert sampler.counts.moved == own
    assert sampler.counts.engines_lost == 1
    assert [one.completion.versions[0] for one in after] == [2] * 8
    assert tokens(after) != before
    assert second.url in sampler.notices[0]


def test_an_engine_killed_in_the_middle_of_a_batch_loses_nothing(connect, policy, server):
    with subprocess.Popen(
        [sys.executable, "-m", "palaestra.policy.vlm.serving.small_server"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        url = json.loads(child.stdout.readline())["url"]
        sampler = connect(server.url, url)
        sampler.publish(1, policy.trainable_state())
        expected = tokens(
            connect_once(connect, server, policy).sample([request(n) for n in range(24)], temperature=1.0)
        )
        futures = [sampler.submit(request(number), temperature=1.0) for number in range(24)]
        wait(futures[:1])
        child.send_signal(signal.SIGKILL)
        assert tokens([future.result() for future in futures]) == expected
    assert child.returncode == -signal.SIGKILL
    assert sampler.counts.engines_lost <= 1


def connect_once(connect, server, policy):
    """A sampler of one engine, to say what the replies should be."""
    sampler = connect(server.url)
    sampler.publish(1, policy.trainable_state())
    return sampler


def test_a_version_that_one_of_two_engines_refuses_is_taken_back_from_the_other(connect, policy, server, second):
    sampler = connect(server.url, second.url)
    sampler.publish(1, policy.trainable_state())
    move(policy, seed=2)
    second.fault = "refuses adapters"
    with pytest.raises(CollectorFailed, match=rf"^{second.url} did not load adapter .*Version 2 is refused"):
        sampler.publish(2, policy.trainable_state())
    assert [[name.rpartition("-")[2] for name in one.adapters] for one in (server, second)] == [["v1"], ["v1"]]
    assert [path.name[:3] for path in sampler._directory.iterdir()] == ["v1-"]
    replies = sampler.sample([request(number) for number in range(6)], temperature=1.0)
    assert {int(version) for reply in replies for version in reply.completion.versions} == {1}


def test_an_adapter_stays_loaded_while_a_request_uses_it(connect, policy, server):
    sampler = connect()
    sampler.publish(1, policy.trainable_state())
    under_way = [sampler.submit(request(number), temperature=1.0) for number in range(16)]
    move(policy, seed=4)
    sampler.publish(2, policy.trainable_state())
    versions = [future.result().completion.versions[0] for future in under_way]
    assert set(versions) <= {1, 2}
    assert sampler.sample([request(99)], temperature=1.0)[0].completion.versions[0] == 2
    assert [name.rpartition("-")[2] for name in server.adapters] == ["v2"]


def test_a_version_that_is_published_while_a_request_is_encoded_answers_it(connect, policy, server):
    sampler = connect()
    sampler.publish(1, policy.trainable_state())
    real, started, resume = sampler._encoder.encode, threading.Event(), threading.Event()

    def encode(prompt, **settings):
        if not started.is_set():
            started.set()
            resume.wait()
        return real(prompt, **settings)

    sampler._encoder.encode = encode
    waiting = sampler.submit(request(1), temperature=1.0)
    started.wait()
    move(policy, seed=4)
    sampler.publish(2, policy.trainable_state())
    resume.set()
    # Not version 1, which is unloaded and whose files are gone.
    assert set(waiting.result().completion.versions.tolist()) == {2}
    assert sampler.counts.retries == 0


def test_requests_are_under_way_at_once_up_to_the_limit(connect, policy, server):
    server.most_at_once = 0
    sampler = connect(max_concurrency=3)
    sampler.publish(1, policy.trainable_state())
    sampler.sample([request(number) for number in range(12)], temperature=1.0)
    assert 2 <= server.most_at_once <= 3


def test_two_runs_share_an_engine_without_sharing_adapters(connect, policy, server):
    first, second = connect(), connect()
    first.publish(1, policy.trainable_state())
    move(policy, seed=8)
    second.publish(1, policy.trainable_state())
    assert len(set(server.adapters)) == 2
    fingerprints = {one.sample([request(1)], temperature=1.0)[0].completion.fingerprint for one in (first, second)}
    assert len(fingerprints) == 2
