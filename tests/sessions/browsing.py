"""A real browser for a test, with pages and sessions in it."""

import asyncio

import pytest

from palaestra.errors import ConfigError
from palaestra.sessions.browser.browser import Browser
from palaestra.sessions.browser.chromium import find_chromium
from palaestra.sessions.browser.page import Page, PageResponse
from palaestra.sessions.browser.session import BrowserSession
from palaestra.sessions.screen import Size

try:
    INSTALLED = find_chromium()
except ConfigError as missing:
    pytest.skip(str(missing), allow_module_level=True)

SCREEN = Size(200, 200)

drawn_on_demand = pytest.mark.skipif(
    not INSTALLED.draws_on_demand, reason="only the headless shell draws on demand, with virtual time"
)


def with_browser(play):
    """What `await play(browser)` gives, in a browser of its own."""

    async def run():
        browser = await Browser.start()
        try:
            return await play(browser)
        finally:
            await browser.stop()

    return asyncio.run(run())


def session_in(browser, **settings):
    async def give():
        return browser

    return BrowserSession(give, **settings)


async def page_in(browser, html, *, files=None, size=SCREEN, **settings):
    """A page that shows `html`; `files` are what else its origin has, by path."""
    served = {"/": html, **(files or {})}

    def serve(request):
        body = served.get(request.path)
        return None if body is None else PageResponse(body.encode())

    return await Page.open(browser, size, serve, seed=3, **settings)
