"""The routes: what they answer, how streams resume, and that the description is kept to."""

import asyncio
import http.client
import json
import subprocess
import sys
import urllib.parse

import pytest

from palaestra.files.home import Home
from palaestra.runs.reader import RunReader
from palaestra.runs.service.app import build_api
from palaestra.runs.service.auth import AuthMiddleware
from palaestra.runs.service.web.access import WebAccess
from palaestra.telemetry.event import TrainingStep, decode


def _events(body):
    found = []
    for block in body.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "event" in fields:
            found.append((fields.get("id", ""), fields["event"], fields["data"]))
    return found


def test_a_run_is_started_and_found_again(served):
    answer = served.ask("POST", "/runs", {"spec": {"runner": "echo", "config": {"steps": 2}, "tags": ["x"]}})
    assert answer.status == 201
    run_id = answer.json["run_id"]
    assert (answer.json["phase"], answer.json["attempt"], answer.json["tags"]) == ("queued", 0, ["x"])
    served.trainer.wait(run_id, timeout_s=30)
    assert [run["run_id"] for run in served.ask("GET", "/runs?tag=x").json] == [run_id]
    assert served.ask("GET", "/runs?phase=queued").json == []
    assert served.ask("GET", "/runs?limit=1&phase=succeeded").json[0]["run_id"] == run_id
    assert served.ask("GET", f"/runs/{run_id}/spec").json["config"] == {"steps": 2}


def test_runs_are_found_by_agent_and_words_and_read_page_by_page(served):
    ids = [served.trainer.start_run({"steps": 1}, runner="echo", tags=["paged", f"n{n}"]) for n in range(5)]
    for run_id in ids:
        served.trainer.wait(run_id, timeout_s=30)
    newest_first = [row.run_id for row in served.trainer.runs(tag="paged")]
    assert sorted(newest_first) == sorted(ids)
    first = [run["run_id"] for run in served.ask("GET", "/runs?tag=paged&limit=2").json]
    rest = [run["run_id"] for run in served.ask("GET", f"/runs?tag=paged&before={first[-1]}").json]
    assert first + rest == newest_first
    assert [run["run_id"] for run in served.ask("GET", "/runs?search=PAGED%20n3").json] == [ids[3]]
    assert len(served.ask("GET", "/runs?tag=paged&agent=echo/echo").json) == 5
    assert served.ask("GET", "/runs?agent=echo/other").json == []
    assert served.ask("GET", "/runs?before=nobody").status == 404


def test_the_bytes_of_a_clip_are_sent_and_of_nothing_else(served):
    run_id = served.done()
    attempt = served.home.run(run_id).attempt(1)
    attempt.videos.mkdir()
    (attempt.videos / "a.webm").write_bytes(b"0123456789")
    (clip,) = served.ask("GET", f"/runs/{run_id}/videos").json
    assert clip["name"] == "attempt_1/videos/a.webm"
    place = f"/runs/{run_id}/videos/{clip['name']}"
    whole = served.ask("GET", place)
    assert (whole.status, whole.headers["Content-Type"], whole.body) == (200, "video/webm", b"0123456789")
    part = served.ask("GET", place, headers={"Range": "bytes=2-4"})
    assert (part.status, part.headers["Content-Range"], part.body) == (206, "bytes 2-4/10", b"234")
    assert served.ask("GET", place, headers={"Range": "bytes=-3"}).body == b"789"
    behind = served.ask("GET", place, headers={"Range": "bytes=10-"})
    assert (behind.status, behind.headers["Content-Range"], "error" in behind.json) == (416, "bytes */10", True)
    assert served.ask("GET", place, headers={"Range": "lines=1-2"}).json["error"]["place"] == "Range"
    for other in ("attempt_1/stdout.log", "spec.json", "attempt_1/videos/../stdout.log", "../../registry.sqlite"):
        answer = served.ask("GET", f"/runs/{run_id}/videos/{urllib.parse.quote(other, safe='')}")
        assert (answer.status, answer.json["error"]["code"]) == (404, "unknown_run"), other


def test_refusals_carry_place_reason_and_remedy(served):
    answer = served.ask("POST", "/runs", {"spec": {"runner": "ecko"}})
    assert answer.status == 422
    error = answer.json["error"]
    assert (error["code"], error["place"], error["value"]) == ("refused", "runner", "ecko")
    assert error["remedy"] == "Did you mean 'echo'?"
    answer = served.ask("POST", "/runs", {"spec": {"runnr": "echo"}})
    assert answer.json["error"]["text"] == "spec.runnr = 'echo': unknown key. Did you mean 'runner'?"
    answer = served.ask("POST", "/runs", {"spec": {"runner": "echo", "gpus": True}})
    assert answer.json["error"]["text"] == "spec.gpus = True: is not a number."
    twice = b'{"spec": {"runner": "echo", "seed": 1, "seed": 2}}'
    answer = served.ask("POST", "/runs", raw=twice, headers={"Content-Type": "application/json"})
    assert answer.status == 422
    assert "the key 'seed' is given twice" in answer.json["error"]["text"]
    assert served.ask("GET", "/runs/nobody").json["error"]["code"] == "unknown_run"
    assert served.ask("PUT", "/runs", {}).headers["Allow"] == "GET, POST"
    assert served.ask("GET", "/nowhere").json["error"]["code"] == "no_route"
    run_id = served.done()
    answer = served.ask("POST", f"/runs/{run_id}/stop", {})
    assert (answer.status, answer.json["error"]["code"]) == (409, "illegal_transition")
    assert served.ask("GET", f"/runs/{run_id}/metrics/series?name=m9").json["error"]["remedy"].startswith("Nearest: m")
    assert served.ask("GET", f"/runs/{run_id}/log?attempt=7").json["error"]["remedy"] == "There are 1"


def test_a_preview_shows_exactly_what_is_executed(served):
    spec = {"runner": "echo", "config": {"steps": 2}, "name": "same"}
    preview = served.ask("POST", "/preflight", {"spec": spec}).json
    assert preview["digest"] == preview["command"]["digest"]
    assert {finding["level"] for finding in preview["findings"]} == {"ok"}
    run_id = served.ask("POST", "/runs", {"spec": spec}).json["run_id"]
    served.trainer.wait(run_id, timeout_s=30)
    assert served.ask("GET", f"/runs/{run_id}/command").json["digest"] == preview["digest"]
    assert run_id != preview["run_id"]


def test_the_id_of_a_preview_is_taken_once_and_its_command_is_executed_to_the_letter(served):
    spec = {"runner": "echo", "config": {"steps": 2}, "environment": {"HELLO": "world"}}
    preview = served.ask("POST", "/preflight", {"spec": spec}).json
    assert preview["run_id"] in preview["command"]["cwd"]
    assert preview["environment"]["HELLO"] == "world"
    assert preview["environment"]["TMPDIR"].endswith("/tmp")
    assert "PATH" not in preview["environment"]
    start = {"spec": spec, "run_id": preview["run_id"]}
    assert served.ask("POST", "/runs", start).json["run_id"] == preview["run_id"]
    again = served.ask("POST", "/runs", start)
    assert (again.status, again.json["error"]["place"]) == (422, "run_id")
    served.trainer.wait(preview["run_id"], timeout_s=30)
    assert served.ask("GET", f"/runs/{preview['run_id']}/command").json == preview["command"]
    served.ask("DELETE", f"/runs/{preview['run_id']}")
    assert served.ask("POST", "/runs", start).status == 422
    assert served.ask("POST", "/runs", {**start, "run_id": "../x"}).status == 422


def test_the_command_is_the_newest_attempts_unless_another_is_asked_for(served):
    run_id = served.done(steps=3, checkpoint_every=1, then="exit:1")
    served.trainer.resume_run(run_id)
    served.trainer.wait(run_id, timeout_s=30)
    first, second = (served.ask("GET", f"/runs/{run_id}/command?attempt={number}").json for number in (1, 2))
    assert "attempt_1/" in first["cwd"]
    assert "attempt_2/" in second["cwd"]
    assert served.ask("GET", f"/runs/{run_id}/command").json == second


def test_a_mistake_of_the_service_is_answered_as_any_refusal_and_logged(tmp_path, caplog):
    api = build_api(
        None, RunReader(Home(tmp_path)), None, None, None, None, asyncio.Event(), WebAccess("token"), None, None
    )

    @api.get("/broken")
    def broken():
        raise ZeroDivisionError("Bearer abcdefgh")

    sent = []

    async def ask():
        async def send(message):
            sent.append(message)

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        headers = [(b"authorization", b"Bearer token"), (b"host", b"localhost")]
        scope = {"type": "http", "method": "GET", "path": "/broken", "headers": headers, "query_string": b""}
        await AuthMiddleware(api, "token")(scope, receive, send)

    asyncio.run(ask())

    assert sent[0]["status"] == 500
    error = json.loads(sent[1]["body"])["error"]
    assert (error["code"], "ZeroDivisionError" in error["text"]) == ("failed", True)
    assert "abcdefgh" not in error["text"]
    assert "in broken" in caplog.text


def test_a_stream_goes_on_behind_any_id(served):
    run_id = served.done(steps=12)
    whole = _events(served.ask("GET", f"/runs/{run_id}/events").body)
    assert whole[-1][1] == "end"
    records = [decode(data) for _, kind, data in whole if kind == "event"]
    assert [r.event.update for r in records if isinstance(r.event, TrainingStep)] == list(range(1, 13))
    for cut in range(len(whole) - 1):
        place = whole[cut][0]
        rest = _events(served.ask("GET", f"/runs/{run_id}/events?after={place}").body)
        assert rest == whole[cut + 1 :]
    again = served.ask("GET", f"/runs/{run_id}/events", headers={"Last-Event-ID": whole[3][0]})
    assert _events(again.body) == whole[4:]
    assert served.ask("GET", f"/runs/{run_id}/events?after=nonsense").status == 422


def test_output_is_read_in_pieces_that_join_without_a_gap(served):
    run_id = served.done(steps=1, flood=1)
    path = served.home.run(run_id).attempt(1).stdout
    whole = path.read_text()
    assert len(whole) > 100_000
    offset, text = 0, ""
    while True:
        piece = served.ask("GET", f"/runs/{run_id}/log?offset={offset}&limit=50000").json
        if piece["offset"] == offset:
            break
        offset, text = piece["offset"], text + piece["text"]
    assert text == whole
    assert (piece["size"], piece["ended"]) == (len(whole.encode()), True)
    streamed = _events(served.ask("GET", f"/runs/{run_id}/log/stream").body)
    assert "".join(json.loads(data)["text"] for _, kind, data in streamed if kind == "log") == whole
    middle = streamed[1][0]
    rest = _events(served.ask("GET", f"/runs/{run_id}/log/stream", headers={"Last-Event-ID": middle}).body)
    assert rest == streamed[2:]
    for wrong in ("abc", "-1", "9" * 30):
        answer = served.ask("GET", f"/runs/{run_id}/log/stream", headers={"Last-Event-ID": wrong})
        assert (answer.status, answer.json["error"]["place"]) == (422, "Last-Event-ID")
    assert "".join(line + "\n" for line in served.trainer.stream_log(run_id, offset=-100)) in whole
    tail = served.ask("GET", f"/runs/{run_id}/log?offset=-100").json["text"]
    assert whole.endswith(tail)


def test_numbers_are_answered_by_name(served):
    run_id = served.done(steps=2)
    names = served.ask("GET", f"/runs/{run_id}/metrics").json
    assert names["m0"] == {"points": 2, "source": "journal"}
    recent = served.ask("GET", f"/runs/{run_id}/metrics/recent?count=1&name=m0&name=m1").json
    assert [(name, points[0][:2]) for name, points in recent.items()] == [("m0", [20, 2.0]), ("m1", [20, 3.0])]
    series = served.ask("GET", f"/runs/{run_id}/metrics/series?name=m0&points=4").json
    assert [point[0] for point in series["m0"]] == [10, 20]


def test_runners_and_their_schemas(served):
    runners = served.ask("GET", "/runners").json
    assert {"palaestra", "cleanrl", "sb3", "echo"} <= set(runners)
    assert runners["cleanrl"]["runs_foreign_code"] is True
    assert "steps" in served.ask("GET", "/runners/echo/schema").json["properties"]
    answer = served.ask("GET", "/runners/ecko/schema")
    assert (answer.status, answer.json["error"]["remedy"]) == (404, "Did you mean 'echo'?")


def test_the_events_of_all_runs_are_streamed_as_they_occur(served):
    parts = urllib.parse.urlsplit(served.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
    connection.request("GET", "/stream", headers={"Authorization": f"Bearer {served.token}"})
    response = connection.getresponse()
    assert response.readline() == b":\n"
    run_id = served.done(steps=1)
    heard = []
    while "succeeded" not in heard:
        line = response.readline().decode()
        if line.startswith("data: "):
            told = json.loads(line[6:])
            assert told["run_id"] == run_id
            heard.append(told["kind"])
    assert heard == ["note", "launched", "first_sign", "succeeded"]
    connection.close()


# A run that can be asked for may well be refused; what schemathesis calls valid is what the description can say.
CHECKED = ("--exclude-checks", "positive_data_acceptance")
# Streams that never end, looks at the machine, and what would read, write or start whatever it is told to.
LEFT_OUT = ("stream", "metric_stream", "doctor", "export", "import_checkpoint", "tensorboard")
SLOW = ("start_run", "preflight", "runner_schema")


def _fuzzed(served, directory, *words, without):
    pytest.importorskip("schemathesis")
    served.done()
    left_out = [word for name in without for word in ("--exclude-operation-id", name)]
    done = subprocess.run(
        [
            sys.executable, "-m", "schemathesis.cli", "run", f"{served.url}/openapi.json", "--seed", "1",
            "-H", f"Authorization: Bearer {served.token}", "--no-color", *CHECKED, *left_out, *words,
            # A preflight looks into interpreters, which takes a while on a busy machine.
            "--request-timeout", "120",
        ],
        cwd=directory, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]


def test_nothing_that_the_description_allows_is_answered_otherwise_than_described(served, tmp_path):
    _fuzzed(served, tmp_path, "--max-examples", "4", "--phases", "fuzzing", without=LEFT_OUT + SLOW)


@pytest.mark.slow
def test_nothing_at_all_is_answered_otherwise_than_described(served, tmp_path):
    _fuzzed(served, tmp_path, "--max-examples", "50", "--phases", "coverage,fuzzing", without=LEFT_OUT)
