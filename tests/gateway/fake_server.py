"""A session server by the wire contract, with `FakeSession` behind it: `python -m tests.gateway.fake_server`.

Beside the contract's routes each session has some that only a proxy's test asks for (echo, large, hang, cut, count).
"""

import asyncio
import json
import os
import signal
import sys

from aiohttp import web

from palaestra.errors import SessionFailed, SessionRefused
from palaestra.sessions.action import decode
from palaestra.sessions.fake import FakeSession
from palaestra.sessions.task import TaskRequest

SESSIONS = web.AppKey("sessions", dict)


def _error(status, code, message, **more):
    return web.json_response({"error": {"code": code, "message": message, **more}}, status=status)


@web.middleware
async def errors(request, handler):
    try:
        return await handler(request)
    except SessionRefused as error:
        return _error(error.status, error.code, str(error))
    except SessionFailed as error:
        return _error(500, "environment_failed", error.detail, reason=error.reason)


def _session(request):
    try:
        return request.app[SESSIONS][request.match_info["id"]]
    except KeyError:
        raise SessionRefused("no_session", "no such session", status=404) from None


async def health(request):
    return web.json_response({"status": "ok", "pid": os.getpid(), "sessions": len(request.app[SESSIONS])})


async def session_health(request):
    _session(request)
    return web.json_response({"ready": True})


async def open_session(request):
    request.app[SESSIONS][(await request.json())["session_id"]] = FakeSession()
    return web.json_response({}, status=201)


async def close_session(request):
    session = _session(request)
    del request.app[SESSIONS][request.match_info["id"]]
    await session.close()
    return web.json_response({})


async def reset(request):
    spec = await _session(request).reset(TaskRequest(**await request.json()))
    return web.json_response(spec.facts())


async def act(request):
    asked = await request.json()
    step = await _session(request).act(decode(asked["action"]), step=asked["step"])
    return web.json_response({"step": step.number, "progress": step.progress.facts()})


async def screenshot(request):
    picture = await _session(request).screenshot()
    return web.Response(body=picture.data, content_type=picture.media_type)


async def progress(request):
    return web.json_response((await _session(request).progress()).facts())


async def echo(request):
    facts = {
        "method": request.method, "raw_path": request.raw_path, "pid": os.getpid(), "tmp": os.environ.get("TMPDIR"),
        "headers": [[name.decode("latin-1").lower(), value.decode("latin-1")] for name, value in request.raw_headers],
        "body": (await request.read()).decode("latin-1"),
        "environment": [name for name in os.environ if "TOKEN" in name],
    }  # fmt: skip
    headers = {"Set-Cookie": "a=b", "X-Kept": "yes", "Connection": "keep-alive, x-hop", "X-Hop": "no"}
    return web.json_response(facts, headers=headers)


async def large(request):
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(int(request.query["pieces"])):
        await response.write(b"x" * 65536)
    return response


async def count(request):
    total = pieces = 0
    async for piece in request.content.iter_any():
        total, pieces = total + len(piece), pieces + 1
    return web.json_response({"bytes": total})


async def mirror(request):
    """Sends each piece back as it comes."""
    response = web.StreamResponse()
    await response.prepare(request)
    async for piece in request.content.iter_any():
        await response.write(piece)
    return response


async def unchanged(request):
    return web.Response(status=304, headers={"ETag": '"x"'})


async def hang(request):
    await asyncio.Event().wait()


async def cut(request):
    """Promises a hundred bytes and hangs up after three."""
    response = web.StreamResponse(headers={"Content-Length": "100"})
    await response.prepare(request)
    await response.write(b"abc")
    request.transport.close()
    return response


async def deaf(request):
    """Stops the whole server without ending it."""
    os.kill(os.getpid(), signal.SIGSTOP)


def build():
    app = web.Application(middlewares=[errors], client_max_size=1 << 30)
    app[SESSIONS] = {}
    app.router.add_get("/health", health)
    app.router.add_post("/sessions", open_session)
    app.router.add_delete("/sessions/{id}", close_session)
    app.router.add_get("/sessions/{id}/health", session_health)
    routes = {
        "act": act,
        "count": count,
        "cut": cut,
        "deaf": deaf,
        "hang": hang,
        "large": large,
        "mirror": mirror,
        "unchanged": unchanged,
    }
    for name, route in {**routes, "progress": progress, "reset": reset, "screenshot": screenshot}.items():
        app.router.add_route("*", f"/sessions/{{id}}/{name}", route)
    app.router.add_route("*", "/sessions/{id}/echo{rest:.*}", echo)
    return app


async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    # A stand-in for a browser: a process in a session of its own that ends only when it is killed.
    browser = await asyncio.create_subprocess_exec("sleep", "3600", start_new_session=True)
    runner = web.AppRunner(build(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    sys.stdout.write(json.dumps({"port": runner.addresses[0][1]}) + "\n")
    sys.stdout.flush()
    await stop.wait()
    browser.kill()
    await browser.wait()
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
