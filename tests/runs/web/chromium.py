"""A real Chromium that may reach the service under test, driven over the DevTools protocol from ordinary tests."""

import asyncio
import base64
import contextlib
import threading
import time
from unittest.mock import patch

from palaestra.sessions.browser import chromium
from palaestra.sessions.browser.browser import Browser

_OPEN_NETWORK = ("--host-resolver-rules", "--proxy")


class WebPage:
    """One page in a context of its own, with the problems that the browser reported."""

    def __init__(self, browser, context, target, session):
        self._browser, self.context, self._target, self._session = browser, context, target, session
        self.problems = []
        """Violations of the content security policy, exceptions and errors of the console."""
        self.requests = []

    def on_event(self, method, params):
        if method == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"].get("exception", {}).get("description", str(params)))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Audits.issueAdded" and params["issue"]["code"] == "ContentSecurityPolicyIssue":
            self.problems.append(str(params["issue"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def call(self, method, **params):
        return self._browser.run(self._browser.cdp.call(method, params, session=self._session, timeout=30))

    def goto(self, url):
        self.call("Page.navigate", url=url)

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, expression, timeout_s=20.0):
        """Wait until a JavaScript expression is truthy."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(AssertionError):
                # An element is not a value: it would arrive as an empty object.
                if self.evaluate(f"Boolean({expression})"):
                    return
            time.sleep(0.05)
        raise AssertionError(f"not true in time: {expression}; {self.problems}; {self.text()[:2000]}")

    def text(self):
        return self.evaluate("document.body.innerText")

    def screenshot(self, path):
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def set_size(self, width, height, *, dark=False):
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def set_network(self, *, latency_ms, bytes_per_s):
        self.call(
            "Network.emulateNetworkConditions",
            offline=False,
            latency=latency_ms,
            downloadThroughput=bytes_per_s,
            uploadThroughput=bytes_per_s,
        )


class WebBrowser:
    """A browser whose event loop runs in a thread, because the tests and the service are synchronous."""

    def __init__(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._browser = None

    def start(self):
        flags = tuple(flag for flag in chromium._FLAGS if not flag.startswith(_OPEN_NETWORK))
        installed = chromium.ChromiumBinary(chromium.find_chromium().path, draws_on_demand=False)
        with patch.object(chromium, "_FLAGS", flags), patch.object(chromium, "_UNLIMITED", ()):
            self._browser = self.run(Browser.start(installed))
        self.cdp = self._browser.cdp

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def open(self):
        """A page that shares no cookie with another."""
        context = self.run(self.cdp.call("Target.createBrowserContext", {"disposeOnDetach": True}))["browserContextId"]
        settings = {"url": "about:blank", "browserContextId": context, "width": 1200, "height": 800}
        target = self.run(self.cdp.call("Target.createTarget", settings))["targetId"]
        session = self.run(self.cdp.call("Target.attachToTarget", {"targetId": target, "flatten": True}))["sessionId"]
        page = WebPage(self, context, target, session)
        self.cdp.subscribe(session, page.on_event)
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            page.call(f"{domain}.enable")
        page.set_size(1200, 800)
        return page

    def close_page(self, page):
        self.run(self.cdp.call("Target.disposeBrowserContext", {"browserContextId": page.context}))

    def stop(self):
        if self._browser is not None:
            self.run(self._browser.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()
