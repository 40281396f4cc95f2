"""A Chromium process: finding the program, starting it, and stopping it completely.

Looks for Debian's headless shell first (it draws on demand, which gives the fastest screenshots), then for Playwright's
and for full browsers. The connection is a pipe, so no port is open. The profile is a temporary directory, and the
process leads its own process group, which is killed as a whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from palaestra.errors import ConfigError, SessionFailed
from palaestra.processes.procfs import list_pids, read_stat

_NAMES = ("chromium-headless-shell", "headless_shell", "chromium", "chromium-browser", "google-chrome", "chrome")
_REMEDY = "Install one: apt-get install chromium-headless-shell, or: playwright install chromium"
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--no-default-browser-check", "--disable-extensions", "--disable-breakpad",
    "--disable-client-side-phishing-detection", "--disable-default-apps", "--disable-dev-shm-usage",
    "--disable-domain-reliability",
    # The last one delays a page's tasks after an input until a frame that may never be drawn.
    "--disable-features=Translate,MediaRouter,OptimizationHints,PaintHolding,DeferRendererTasksAfterInput",
    # A page in this cache would stop the clock of the next page.
    "--disable-back-forward-cache",
    # Selected text must not be pasted by a middle click in another page.
    "--blink-settings=selectionClipboardBufferAvailable=false",
    "--disable-smooth-scrolling", "--disable-hang-monitor", "--disable-popup-blocking", "--disable-prompt-on-repost",
    "--deny-permission-prompts",
    "--disable-renderer-backgrounding",
    "--disable-background-timer-throttling", "--disable-backgrounding-occluded-windows", "--force-color-profile=srgb",
    "--force-device-scale-factor=1", "--hide-scrollbars", "--metrics-recording-only", "--mute-audio",
    "--password-store=basic", "--use-mock-keychain", "--font-render-hinting=none", "--remote-debugging-pipe",
    # No host name is resolved: tasks are served through the pipe.
    "--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=127.0.0.1:1", "--proxy-bypass-list=<-loopback>",
    # WebRTC needs no host names and is not intercepted. The flag has one name in the shell and one in full browsers.
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp", "--webrtc-ip-handling-policy=disable_non_proxied_udp",
)  # fmt: skip
_DRAWN_ON_DEMAND = (
    "--enable-begin-frame-control", "--run-all-compositor-stages-before-draw",
    "--disable-new-content-rendering-timeout", "--disable-threaded-animation", "--disable-threaded-scrolling",
    "--disable-checker-imaging",
    # There is no network to isolate: one process less, and 4 % less processor time for a session of one act.
    "--enable-features=NetworkServiceInProcess2",
)  # fmt: skip
_UNLIMITED = ("--disable-frame-rate-limit", "--disable-gpu-vsync")
GRACE_S = 3.0


@dataclass(frozen=True)
class ChromiumBinary:
    """An installed browser."""

    path: str
    draws_on_demand: bool
    """Whether frames can be drawn on demand (only in the headless shell)."""


def find_chromium(path: str | None = None) -> ChromiumBinary:
    """The browser at `path`, at `$PALAESTRA_CHROMIUM`, or the best one found; `ConfigError` when there is none."""
    requested = path or os.environ.get("PALAESTRA_CHROMIUM")
    if requested:
        program = shutil.which(requested)
        if program is None:
            place = "browser.path" if path else "PALAESTRA_CHROMIUM"
            raise ConfigError(place, requested, "is not a program that can be run", _REMEDY)
        return ChromiumBinary(program, "shell" in Path(program).name)
    for name in _list_candidates():
        program = shutil.which(name)
        if program is not None:
            return ChromiumBinary(program, "shell" in Path(program).name)
    raise ConfigError("browser", None, "no Chromium was found on this machine", _REMEDY)


def _list_candidates() -> Iterator[str]:
    yield from _NAMES
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright")
    for pattern in ("chromium_headless_shell-*/*/headless_shell", "chromium_headless_shell-*/*/*headless-shell"):
        yield from (str(path) for path in sorted(cache.glob(pattern), reverse=True))
    yield from (str(path) for path in sorted(cache.glob("chromium-*/*/chrome"), reverse=True))


class Chromium:
    """A running browser process and the file descriptors of its pipe."""

    def __init__(self, process: asyncio.subprocess.Process, profile: Path, write_fd: int, read_fd: int) -> None:
        self.process, self._profile = process, profile
        self.write_fd, self.read_fd = write_fd, read_fd

    @classmethod
    async def start(cls, installed: ChromiumBinary) -> Chromium:
        """Start a browser with a new profile."""
        profile = Path(tempfile.mkdtemp(prefix="palaestra-chromium-"))
        child_read_fd, write_fd = os.pipe()
        read_fd, child_write_fd = os.pipe()
        drawing = _DRAWN_ON_DEMAND if installed.draws_on_demand else _UNLIMITED
        command = [installed.path, *_FLAGS, *drawing, f"--user-data-dir={profile}", "about:blank"]
        # The browser expects the pipe on descriptors 3 and 4.
        script = f'exec 3<&{child_read_fd} 4>&{child_write_fd}; exec "$@"'
        try:
            process = await asyncio.create_subprocess_exec(
                "/bin/bash", "-c", script, "palaestra-chromium", *command, pass_fds=(child_read_fd, child_write_fd),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, "HOME": str(profile), "XDG_RUNTIME_DIR": str(profile)},
            )  # fmt: skip
        except OSError as error:
            os.close(write_fd)
            os.close(read_fd)
            shutil.rmtree(profile, ignore_errors=True)
            raise SessionFailed("browser_gone", f"{installed.path} could not be started ({error})") from None
        finally:
            os.close(child_read_fd)
            os.close(child_write_fd)
        return cls(process, profile, write_fd, read_fd)

    async def stop(self) -> None:
        """Kill the process group, wait until it is gone, and remove the profile. Can be called repeatedly."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self.process.wait()
        await self._wait_for_group()
        # The last writes may race with the removal, so it is repeated.
        for _ in range(3):
            shutil.rmtree(self._profile, ignore_errors=True)
            if not self._profile.exists():
                return
            await asyncio.sleep(0.05)

    async def _wait_for_group(self) -> None:
        """Wait for the renderers, which outlive the browser for a moment and then are not its children any more."""
        end = asyncio.get_running_loop().time() + GRACE_S
        while asyncio.get_running_loop().time() < end:
            if not _group_is_alive(self.process.pid):
                return
            await asyncio.sleep(0.01)


def _group_is_alive(group: int) -> bool:
    """Whether a process of the group is running; zombies do not count."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    if not Path("/proc/self/stat").exists():
        return True
    return any(stat is not None and stat.group == group for stat in map(read_stat, list_pids()))
