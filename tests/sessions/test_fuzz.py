"""The session server against requests made up from its own OpenAPI document, valid and not."""

import asyncio

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from palaestra.sessions.fake import FakeSession
from palaestra.sessions.server.app import build_app
from palaestra.sessions.task import TaskRequest


class _KeptOpen(FakeSession):
    """Outlives the server, which is started once per operation."""

    async def close(self):
        pass


BEGUN = _KeptOpen()

FRESH = schemathesis.openapi.from_asgi("/openapi.json", build_app(FakeSession))
UNDER_WAY = schemathesis.openapi.from_asgi("/openapi.json", build_app(lambda: BEGUN)).include(path="/act")

# What a document's shape allows may still be refused: a key of no keyboard, a place off the screen.
MAY_REFUSE = [positive_data_acceptance]
QUICK = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@FRESH.parametrize()
@QUICK
def test_every_request_is_answered_as_the_document_says(case):
    case.call_and_validate(excluded_checks=MAY_REFUSE)


@UNDER_WAY.parametrize()
@settings(QUICK, max_examples=100)
def test_every_act_of_an_episode_under_way_is_answered_as_the_document_says(case):
    asyncio.run(BEGUN.reset(TaskRequest("fake/button", 1)))
    for given in (case.body, case.query):
        if isinstance(given, dict) and type(given.get("step")) is int and given["step"] > 1:
            given["step"] = 1  # any other number would be out of order, and nothing further be looked at
    case.call_and_validate(excluded_checks=MAY_REFUSE)
