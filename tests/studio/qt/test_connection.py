"""The window without its service: killed and started again, replaced by something else, or silent."""

import os
import signal
import threading

import pytest
from tests.runs.serving import end_service, killed_service, service
from tests.studio.proxy import ANSWERS, Proxy

from palaestra.errors import PalaestraError
from palaestra.files.atomic import read_json
from palaestra.files.home import Home
from palaestra.runs.client.client import TrainerService
from palaestra.runs.phase import Phase
from palaestra.runs.spec import RunSpec

LOST = "The run service does not answer"
BROKEN = ("Something in the studio failed", "A part of the window failed")
"""Notices about faults of the studio itself; what a service answers must not cause them."""


@pytest.fixture
def own_home(tmp_path):
    return Home(tmp_path / "var" / "training")


@pytest.fixture(scope="module")
def proxy(client):
    with Proxy(client._endpoint(False).url) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def finished(client):
    """Two runs that have ended."""
    run_ids = [client.submit(RunSpec(runner="echo", seed=seed, config={"steps": 30})).run_id for seed in (1, 2)]
    assert [client.wait(run_id, timeout_s=120).phase for run_id in run_ids] == [Phase.SUCCEEDED] * 2
    return run_ids


@pytest.fixture
def driver(open_window, proxy, client, finished):
    """A window that reaches the service through the proxy."""
    proxy.answer("")
    remote = TrainerService(url=proxy.url, token=client._endpoint(False).token)
    yield open_window(service_client=remote)
    proxy.answer("")


def is_lost(driver):
    return any(LOST in notice.text for notice in driver.studio.notices.visible())


def kill_service(home):
    os.kill(read_json(home.endpoint)["pid"], signal.SIGKILL)


def act(driver, run_ids):
    """Do everything that asks the service for something."""
    studio = driver.studio
    studio.session.refresh_environments()
    studio.session.choose_environment("Acrobot-v1")
    studio.session.choose_environment("CartPole-v1")
    studio.training.refresh()
    studio.training.save_preset("mine")
    studio.training.check()
    studio.browser.refresh()
    studio.browser.show(run_ids[1])
    studio.browser.choose(run_ids)
    studio.browser.load_detail("m0", 0, 100)
    studio.browser.edit(run_ids[0], name="other")
    studio.browser.resume("no-such-run")
    studio.browser.stop("no-such-run")
    studio.browser.delete("no-such-run")
    studio.browser.archive("no-such-run")
    studio.browser.record_video("no-such-run")
    studio.browser.open_tracking(lambda url: None)
    studio.library.refresh()
    studio.library.verify("no-such-checkpoint")
    studio.library.deploy("no-such-checkpoint")
    studio.library.import_file("/no/such/file")
    studio.episodes.refresh()
    studio.episodes.delete("no-such-episode")
    studio.trajectories.show_run(run_ids[1])
    studio.trajectories.open("attempt_1/trajectories/00000000_x.safetensors")
    studio.session.start()


def test_a_killed_service_is_noticed_and_found_again_when_it_is_started_by_hand(open_window, own_home):
    with killed_service(own_home) as local:
        url, token = local._endpoint(False).url, local._endpoint(False).token
        config = {"steps": 120, "rate": 40, "metrics": 1}
        run_id = local.submit(RunSpec(runner="echo", config=config)).run_id
        driver = open_window(service_client=TrainerService(url=url, token=token))
        studio = driver.studio
        driver.window.show_page("runs")
        studio.browser.show(run_id)
        driver.wait(lambda: studio.browser.charts.lines("m0"))
        kill_service(own_home)  # the run goes on while no service looks
        driver.wait(lambda: is_lost(driver))
    driver.wait(lambda: driver.window._connection.text() == "not connected")
    driver.window.commands.get("page.play").perform()
    driver.window.commands.get("page.runs").perform()
    with service(own_home, port=int(url.rpartition(":")[2])):
        driver.wait(lambda: studio.connection.is_connected)
        assert not is_lost(driver)
        assert "The run service answers again." in driver.notices()
        driver.wait(lambda: studio.browser.runs.get(run_id).phase is Phase.SUCCEEDED)
        driver.wait(lambda: [len(line.x) for line in studio.browser.charts.lines("m0")] == [120])
        (line,) = studio.browser.charts.lines("m0")
        assert line.y.tolist() == [float(update) for update in range(1, 121)]
        assert line.x.tolist() == [10.0 * update for update in range(1, 121)]
        driver.window.close()


def test_a_killed_service_of_this_machine_is_started_again_by_the_window_and_a_play_says_that_it_is_gone(
    open_window, own_home
):
    with killed_service(own_home) as local:
        driver = open_window(service_client=local)
        studio = driver.studio
        studio.session.choose_environment("Pendulum-v1")
        studio.session.start()
        driver.wait(lambda: studio.session.play.last_step is not None)
        killed = read_json(own_home.endpoint)["pid"]
        kill_service(own_home)
        driver.wait(lambda: studio.session.play.ended is not None)
    driver.wait(lambda: studio.connection.is_connected and read_json(own_home.endpoint)["pid"] != killed)
    try:
        notice = next(one for one in studio.notices.visible() if one.action == "Start again")
        notice.perform()
        driver.wait(lambda: studio.session.play.is_open and studio.session.play.last_step is not None)
        driver.window.close()
    finally:
        end_service(own_home)


@pytest.mark.parametrize("kind", ANSWERS)
def test_wrong_answers_on_every_route_are_notices_and_what_was_shown_stays(driver, proxy, finished, kind):
    studio = driver.studio
    studio.browser.show(finished[0])
    driver.wait(lambda: any(studio.browser.charts.lines(name) for name in ("m0", "m1")))
    environments = len(studio.session.environments.search(""))
    proxy.answer(kind, spared=("/health",))
    act(driver, finished)
    driver.wait(lambda: studio.feed.is_idle)
    for page in driver.window.pages:
        driver.window.show_page(page)
        driver.wait(lambda: driver.window._rotation.is_idle)
    assert studio.session.play.problem
    assert studio.training.launch.problem
    assert not [text for text in driver.notices() if text.startswith(BROKEN)]
    assert sum(notice.level == "error" for notice in studio.notices.history) >= 10
    assert len(studio.browser.runs) == 2
    assert len(studio.session.environments.search("")) == environments
    proxy.answer("")
    studio.browser.choose(finished)
    driver.wait(lambda: len(studio.browser.charts.lines("m0")) == 2)


@pytest.mark.parametrize("kind", ["page", "error", "hang", "text"])
def test_a_service_that_was_replaced_by_something_else_counts_as_lost(driver, proxy, kind):
    proxy.answer(kind)
    driver.wait(lambda: is_lost(driver))
    proxy.answer("")
    driver.wait(lambda: driver.studio.connection.is_connected)


def test_a_window_on_a_service_that_never_answers_is_closed_within_seconds(driver, proxy, finished):
    proxy.answer("hang", spared=("/health",))
    act(driver, finished)
    driver.wait(lambda: len(proxy.asked) >= 16)
    driver.window.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("studio-")]


def test_a_play_whose_connection_is_refused_says_so_and_is_watched_when_it_is_accepted_again(driver, proxy):
    studio = driver.studio
    proxy.answer("error", "/play/")
    studio.session.choose_environment("Pendulum-v1")
    studio.session.start()
    driver.wait(lambda: any("play cannot be reached" in text for text in driver.notices()))
    assert studio.session.play.is_open
    proxy.answer("")
    driver.wait(lambda: studio.session.play.last_step is not None)


def test_a_wrong_token_is_refused_in_words_that_name_it(client):
    stranger = TrainerService(url=client._endpoint(False).url, token="wrong")
    with pytest.raises(PalaestraError, match="token"):
        stranger.runners()
