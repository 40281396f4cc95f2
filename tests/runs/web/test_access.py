"""Who may open the web page: a link works once, its cookie reads and does nothing else, other sites get nothing."""

import pytest
from tests.runs.service.asking import ask

from palaestra.cli.runs.web import _open_browser
from palaestra.runs.service.web.access import COOKIE_LIFETIME_S, LINK_LIFETIME_S, WebAccess


@pytest.fixture
def cookie(served):
    answer = open_link(served)
    return answer.headers["Set-Cookie"].partition(";")[0]


def open_link(served, run_id=None):
    return ask(served.url, "GET", served.trainer.create_web_link(run_id).removeprefix(served.url))


def test_a_link_works_once_and_sets_a_cookie_that_scripts_cannot_read(served):
    path = served.trainer.create_web_link().removeprefix(served.url)
    first, second = ask(served.url, "GET", path), ask(served.url, "GET", path)
    assert (first.status, first.headers["Location"]) == (303, "/web/")
    value, *attributes = first.headers["Set-Cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(attributes)
    assert served.token not in value
    assert served.token not in path
    assert (second.status, second.headers["Set-Cookie"]) == (303, None)


def test_a_link_to_a_run_opens_it(served):
    run_id = served.done()
    assert open_link(served, run_id[:-2]).headers["Location"] == f"/web/#/runs/{run_id}"
    assert served.ask("POST", "/web/links", {"run_id": "nothing"}).status == 404


def test_a_link_needs_the_token(served, cookie):
    for headers in ({}, {"Cookie": cookie}):
        assert ask(served.url, "POST", "/web/links", {}, headers=headers).status == 401


def test_the_cookie_reads_and_changes_nothing(served, cookie):
    run_id = served.done()
    # Other programs on this host share its cookies, in forms of their own.
    headers = {"Cookie": f'other=1; data={{"x": 1}}; flag; {cookie}; rest=a b'}
    assert ask(served.url, "GET", "/runs", headers=headers).status == 200
    refused = [
        ("POST", "/runs", {"spec": {"runner": "echo"}}), ("PATCH", f"/runs/{run_id}", {"name": "x"}),
        ("DELETE", f"/runs/{run_id}", None), ("POST", "/drain", {"on": True}), ("POST", "/gc", {"dry_run": True}),
    ]  # fmt: skip
    for method, path, body in refused:
        assert ask(served.url, method, path, body, headers=headers).status == 401, path


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_requests_of_other_sites_and_ports_are_refused(served, cookie, site):
    assert ask(served.url, "GET", "/runs", headers={"Cookie": cookie, "Sec-Fetch-Site": site}).status == 401
    own = {"Cookie": cookie, "Sec-Fetch-Site": "same-origin", "Origin": served.url}
    assert ask(served.url, "GET", "/runs", headers=own).status == 200
    for origin in ("http://127.0.0.1:1", "http://evil.example", "null"):
        answer = ask(served.url, "GET", "/runs", headers={"Cookie": cookie, "Origin": origin})
        assert answer.status == 403
    answer = ask(served.url, "POST", "/web/links", {}, token=served.token, headers={"Origin": served.url})
    assert answer.status == 403


def test_a_forged_or_damaged_cookie_is_refused(served, cookie):
    name, _, value = cookie.partition("=")
    expires, _, signature = value.partition(".")
    for forged in ("", ".", f"{int(expires) + 1}.{signature}", f"{expires}.", f"{expires}.é", value[:-1]):
        headers = {"Cookie": f"{name}={forged}".encode().decode("latin-1")}
        assert ask(served.url, "GET", "/runs", headers=headers).status == 401, forged


def test_links_and_cookies_expire():
    now = [1000.0]
    access = WebAccess("t" * 64, clock=lambda: now[0])
    link = access.create_link("/web/")
    cookie = access.create_cookie(secure=True)
    assert cookie.endswith("; Secure")
    headers = {b"cookie": cookie.partition(";")[0].encode()}
    scope = {"type": "http", "method": "GET", "headers": []}
    assert access.allows(scope, headers)
    assert not WebAccess("u" * 64, clock=lambda: now[0]).allows(scope, headers)
    assert not access.allows({**scope, "type": "websocket"}, headers)
    now[0] += LINK_LIFETIME_S
    assert access.redeem_link(link) is None
    now[0] += COOKIE_LIFETIME_S
    assert not access.allows(scope, headers)


def test_the_files_of_the_page_need_no_access_and_hold_no_data(served):
    page = ask(served.url, "GET", "/web/")
    policy = page.headers["Content-Security-Policy"]
    assert page.status == 200
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy
    assert (page.headers["X-Content-Type-Options"], page.headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
    assert b"http://" not in page.body
    assert b"https://" not in page.body
    for name in ("missing.js", "..%2Fauth.py", "%2e%2e"):
        assert ask(served.url, "GET", f"/web/{name}").status in (401, 404), name
    assert ask(served.url, "POST", "/web/", {}).status == 401


def test_files_are_revalidated_and_data_is_never_stored(served, cookie):
    script = ask(served.url, "GET", "/web/main.js")
    assert (script.headers["Cache-Control"], script.headers["Content-Type"]) == (
        "no-cache",
        "text/javascript; charset=utf-8",
    )
    again = ask(served.url, "GET", "/web/main.js", headers={"If-None-Match": script.headers["ETag"]})
    assert (again.status, again.body) == (304, b"")
    data = ask(served.url, "GET", "/runs", headers={"Cookie": cookie})
    assert data.headers["Cache-Control"] == "no-store"


def test_a_page_among_the_files_of_a_run_cannot_act_with_the_cookie(served, cookie):
    run_id = served.done()
    attempt = served.home.run(run_id).path / "attempt_1"
    (attempt / "evil.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>')
    answer = ask(served.url, "GET", f"/runs/{run_id}/artifacts/attempt_1/evil.svg", headers={"Cookie": cookie})
    assert "sandbox" in answer.headers["Content-Security-Policy"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_no_browser_is_opened_without_a_display(monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert not _open_browser("http://127.0.0.1:1/")
