"""Writes docs/http-api.md from the OpenAPI document of the run service."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from palaestra.files.home import Home
from palaestra.runs.archive.schedule import RetentionSchedule
from palaestra.runs.notifications.webhooks import Webhooks
from palaestra.runs.play.plays import Plays
from palaestra.runs.play.policy_planner import PolicyPlanner
from palaestra.runs.reader import RunReader
from palaestra.runs.runners.registry import registered_runners
from palaestra.runs.service.app import build_api
from palaestra.runs.service.web.access import WebAccess
from palaestra.runs.store.rebuild import open_registry
from palaestra.runs.supervisor.supervisor import Supervisor
from palaestra.runs.sweeps.controller import SweepController
from palaestra.runs.tools.tensorboard import TensorBoards

PAGE = Path(__file__).parents[1] / "docs" / "http-api.md"

INTRODUCTION = """# HTTP API of the run service

Everything that `palaestra runs` does, for programs. By default the service listens on this machine only, on port 8710.
`palaestra serve` runs it in the foreground; otherwise it is started automatically when a run is started. In Python,
`palaestra.runs.TrainerService` is a client of this API and starts the service when there is none.

When port 8710 is in use, for example by the service of another state directory, a free port is chosen. A port that is
given (`palaestra serve port=9000`, or in `service.yaml`) is refused instead. The address is in
`var/training/service/endpoint.json`, the token in `var/training/service/token` (mode 0600).

```bash
cd var/training/service
URL=$(python -c 'import json; print(json.load(open("endpoint.json"))["url"])')
curl -H "Authorization: Bearer $(cat token)" "$URL/runs?phase=running"
curl -H "Authorization: Bearer $(cat token)" "$URL/runs" -H 'Content-Type: application/json' \\
     -d '{"spec": {"runner": "echo", "config": {"steps": 100}}}'
curl -N -H "Authorization: Bearer $(cat token)" "$URL/runs/echo-2026/events"
```

A unique prefix of a run id names the run. Bodies are JSON of at most 1 MB with `Content-Type: application/json`.
Requests with an `Origin`, or with a `Host` that is not a name of the service, are refused with 403: web pages are not
served. The OpenAPI document is at `GET /openapi.json`; `make docs` generates this page from it.

## From another machine

The service uses HTTP without encryption, and anyone who has the token can start programs under your account. Keep it on
127.0.0.1 and use a tunnel:

```bash
ssh -L 8710:127.0.0.1:8710 machine          # there: palaestra serve port=8710
```

`TrainerService(url="http://127.0.0.1:8710", token=...)` and `palaestra studio --connect` then work as on that machine.
A proxy with TLS works as well: clients accept `https://` addresses, and `palaestra serve
allowed_hosts=[runs.example.org]` allows the name that the proxy forwards. `palaestra serve host=0.0.0.0` accepts
connections from the network and prints a warning; clients still need the token. The service accepts the loopback
names, the address of the connection, the machine's own name and `allowed_hosts` as `Host`, and refuses others, which
a web page could choose (`allowed_hosts=['*']` allows all).

## Errors

Every response that is not a success is `{"error": {"code", "text", "place", "reason", "remedy", "value"}}`; `text` is
one sentence for people.

| status | codes | meaning |
| --- | --- | --- |
| 401 | `unauthorised` | the token is missing or wrong |
| 403 | `foreign_origin`, `foreign_host` | the request comes from a web page, or its `Host` is not allowed |
| 404 | `unknown_run`, `no_route` | no such run, or several ids have this prefix |
| 409 | `illegal_transition`, `consent_needed` | not possible in this phase; or the command needs consent (`digest`) |
| 413 | `too_large` | the body is too large |
| 422 | `refused`, `bad_request` | refused by the preflight, or bad input; nothing was launched or written |
| 500 | `failed` | an internal error of the service; its `service.log` holds the traceback |

## Streams

Streams are server-sent events with an `id`. A request with `Last-Event-ID` (or `?after=`) continues after that id, from
memory or from files, and delivers every event exactly once. A complete stream ends with `event: end`; when it ends
without that event, the connection broke and the client reconnects. A comment is sent at least every 10 s. A slow reader
is served from files and does not take up memory of the service. `/stream` and `/stream/metrics` have no ids: they begin
with the moment of connecting, and their clients read the past with other routes
([Live curves](run-metrics.md#live-curves)).

| event | data |
| --- | --- |
| `run` | an event of the run (`RunEvent`) |
| `alarm` | the same, for alarms that start or end |
| `event` | one line of the journal: `TrainingStep`, `EpisodeSummary`, `CheckpointSaved`, … ([metrics](metrics.md)) |
| `log` | `{"text": …}`, whole lines of output; the id is the offset of the next line |
| `history` | `{"run_id"}` of `/stream/metrics`: the stored series of the run have everything up to now; load them |
| `points` | `{"run_id", "points"}` of `/stream/metrics`: lists of step, value and time by metric |
| `run_end` | `{"run_id"}` of `/stream/metrics`: the run has ended; the stream goes on |
| `end` | the stream is complete |

NaN and infinities are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`, as in all JSON that Palaestra writes. Times
are unix times.
"""

TITLES = {
    "runs": "Runs",
    "sweeps": "Sweeps",
    "streams": "Streams of a run",
    "metrics": "Metrics",
    "archive": "Archiving and deleting",
    "checkpoints": "Checkpoints",
    "runners": "Runners",
    "environments": "Environments and tasks",
    "datasets": "Datasets",
    "play": "Plays",
    "episodes": "Recorded episodes",
    "files": "Files of a run",
    "trajectories": "Screen episodes of a run",
    "presets": "Presets",
    "tools": "Tools",
    "web": "Web page",
    "service": "Service",
}
METHODS = ("get", "post", "put", "patch", "delete")


def description() -> dict[str, Any]:
    """The OpenAPI document of a service that was never started."""
    with tempfile.TemporaryDirectory() as directory:
        home = Home(Path(directory) / "var" / "training")
        registry = open_registry(home)
        supervisor = Supervisor(home, registry, registered_runners())
        plays = Plays(home, PolicyPlanner(home, supervisor.planner.get_runner).plan, idle_timeout_s=1.0)
        sweeps, tensorboards = SweepController(home, supervisor), TensorBoards(home)
        access = WebAccess("token")
        retention = RetentionSchedule(home, None, supervisor.gc)
        webhooks, closing = Webhooks(home, (), supervisor.get_run), asyncio.Event()
        reader = RunReader(home)
        app = build_api(supervisor, reader, registry, tensorboards, plays, sweeps, closing, access, retention, webhooks)
        registry.close()
        return app.openapi()


def page(document: dict[str, Any]) -> str:
    """The page: routes by tag, then the schemas of bodies and responses."""
    parts = [INTRODUCTION]
    for tag, title in TITLES.items():
        parts.append(f"\n## {title}\n")
        parts += [
            _route(method, path, operations[method])
            for path, operations in document["paths"].items()
            for method in METHODS
            if tag in operations.get(method, {}).get("tags", ())
        ]
    parts.append("\n## Schemas\n")
    for name, schema in sorted(document["components"]["schemas"].items()):
        if "properties" in schema and not name.startswith(("HTTP", "Validation")):
            parts.append(_document(name, schema))
    return "\n".join(parts)


def _route(method: str, path: str, operation: dict[str, Any]) -> str:
    lines = [f"\n**`{method.upper()} {path}`**  ", " ".join(operation.get("description", "").split())]
    asked = [_parameter(one) for one in operation.get("parameters", ()) if one["name"] != "run_id"]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body:
        asked.append(f"body {_kind(body)}")
    answers = [
        f"{status} {_kind(content['schema'])}"
        for status, answer in operation["responses"].items()
        for content in answer.get("content", {}).values()
        if status.startswith("2") and "schema" in content
    ]
    if asked:
        lines.append(f"Takes {', '.join(asked)}.")
    stream = "text/event-stream" in operation["responses"].get("200", {}).get("content", {})
    lines.append("Returns 200 with events." if stream else f"Returns {', '.join(answers)}.")
    return "\n".join(lines)


def _parameter(one: dict[str, Any]) -> str:
    default = one["schema"].get("default")
    shown = f" = {default}" if default not in (None, "") else ""
    return f"`{one['name']}` ({_kind(one['schema'])}{shown})"


def _document(name: str, schema: dict[str, Any]) -> str:
    lines = [f"\n### {name}\n", " ".join(schema.get("description", "").split()), "", "| key | type | description |"]
    lines.append("| --- | --- | --- |")
    for key, field in schema["properties"].items():
        default = field.get("default")
        if default not in (None, "", [], {}):
            shown = f" = {str(default).lower() if isinstance(default, bool) else default}"
        else:
            shown = ""
        text = " ".join(field.get("description", "").split()).replace("|", "\\|")
        lines.append(f"| `{key}` | {_kind(field)}{shown} | {text} |")
    return "\n".join(lines)


_ENUMERATIONS = {"Phase": "[phase](runs.md#phases)", "Outcome": "[outcome](evaluation.md#what-is-counted)"}
"""Types that have no section of their own on the page."""


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _ENUMERATIONS.get(name) or f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(one) for one in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{word}`" for word in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "anything")
    if "prefixItems" in schema:
        return f"list of {', '.join(_kind(one) for one in schema['prefixItems'])}"
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"{_kind(schema['additionalProperties'])} by name"
    return str(kind)


if __name__ == "__main__":
    PAGE.write_text(page(description()))
    print(PAGE)
