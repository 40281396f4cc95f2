"""One service and one browser for the tests of a module."""

import pytest
from tests.runs.service.conftest import Served
from tests.runs.serving import service_thread
from tests.runs.web.chromium import WebBrowser

from palaestra.errors import ConfigError
from palaestra.files.home import Home
from palaestra.sessions.browser.chromium import find_chromium


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    home = Home(tmp_path_factory.mktemp("served").resolve() / "var" / "training")
    with service_thread(home) as url:
        yield Served(home, url)


@pytest.fixture(scope="module")
def browser():
    try:
        find_chromium()
    except ConfigError as error:
        pytest.skip(str(error))
    browser = WebBrowser()
    try:
        browser.start()
        yield browser
    finally:
        browser.stop()


@pytest.fixture
def page(browser):
    """A page; a violation of the policy, an exception or a failed request that it reports fails the test."""
    page = browser.open()
    try:
        yield page
        assert page.problems == []
    finally:
        browser.close_page(page)
