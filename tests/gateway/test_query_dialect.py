"""The query-string dialect through a real gateway to a real session server."""

import asyncio

from tests.gateway.test_process import FAKE, started

RESET = {"task": "fake/button", "seed": 1}  # the square's corner is at (37, 53)


def test_an_act_by_query_passes_through_the_gateway_and_is_done_once(tmp_path):
    async def body():
        async with started(tmp_path, servers=1, command=FAKE) as gateway:
            name = await gateway.opened()
            assert (await gateway.ask("POST", f"/proxy/{name}/reset", json=RESET))[0] == 200
            hit = f"/proxy/{name}/act?action_type=left_click&x=40&y=60"
            assert (await gateway.ask("GET", hit))[1]["error"]["code"] == "step_required"
            answers = []
            for _ in range(2):
                async with gateway.http.get(f"{gateway.url}{hit}&step=1", headers=gateway.owned(hit)) as answer:
                    answers.append((answer.status, answer.headers["Content-Type"], await answer.read()))
            assert answers[0] == answers[1]
            assert answers[0][:2] == (200, "image/png")
            assert (await gateway.ask("GET", f"/proxy/{name}/progress"))[1]["success"] is True

    asyncio.run(body())


def test_the_specifications_session_type_opens_on_a_gateway_with_nothing_configured(tmp_path):
    async def body():
        async with started(tmp_path, servers=1, command=FAKE) as gateway:
            status, opened = await gateway.ask("POST", "/sessions", json={"session_type": "simple_data_entry"})
            assert (status, opened["session_type"]) == (201, "simple_data_entry")

    asyncio.run(body())
