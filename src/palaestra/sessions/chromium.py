"""A Chromium process: where to find one, how to start it, and how to be sure that it is gone.

Looks for Debian's headless shell first (it can be told when to draw, the fastest way to a screenshot), then for
Playwright's and for full browsers. Speaks to it over a pipe, so that no port is open, and keeps its profile in a
directory of its own that goes with it. The process leads a group of its own and is killed as a whole.
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

__all__ = ["Chromium", "Installed", "find_chromium"]

_NAMES = ("chromium-headless-shell", "headless_shell", "chromium", "chromium-browser", "google-chrome", "chrome")
_REMEDY = "Install one: apt-get install chromium-headless-shell, or: playwright install chromium"
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--no-default-browser-check", "--disable-extensions", "--disable-breakpad",
    "--disable-client-side-phishing-detection", "--disable-default-apps", "--disable-dev-shm-usage",
    "--disable-domain-reliability",
    # The last of them holds a page's tasks back after an input, until a frame that may never come.
    "--disable-features=Translate,MediaRouter,OptimizationHints,PaintHolding,DeferRendererTasksAfterInput",
    # A page that was left and is kept for a return would stop the clock of its successor.
    "--disable-back-forward-cache",
    # Selected text is not offered to the next middle click, in whichever page that happens.
    "--blink-settings=selectionClipboardBufferAvailable=false",
    "--disable-smooth-scrolling", "--disable-hang-monitor", "--disable-popup-blocking", "--disable-prompt-on-repost",
    "--deny-permission-prompts",
    "--disable-renderer-backgrounding",
    "--disable-background-timer-throttling", "--disable-backgrounding-occluded-windows", "--force-color-profile=srgb",
    "--force-device-scale-factor=1", "--hide-scrollbars", "--metrics-recording-only", "--mute-audio",
    "--password-store=basic", "--use-mock-keychain", "--font-render-hinting=none", "--remote-debugging-pipe",
    # No name is ever looked up: tasks are served through the pipe, and there is nowhere else to go.
    "--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=127.0.0.1:1", "--proxy-bypass-list=<-loopback>",
    # WebRTC knows addresses without looking them up, and sends where no request is ever seen. The shell knows the rule
    # by one name, the full browser by the other.
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp", "--webrtc-ip-handling-policy=disable_non_proxied_udp",
)  # fmt: skip
_DRAWN_ON_DEMAND = (
    "--enable-begin-frame-control", "--run-all-compositor-stages-before-draw",
    "--disable-new-content-rendering-timeout", "--disable-threaded-animation", "--disable-threaded-scrolling",
    "--disable-checker-imaging",
    # There is no network that the browser would have to be kept apart from: one process less to talk to, and 4 % less
    # processor time for a session of one act.
    "--enable-features=NetworkServiceInProcess2",
)  # fmt: skip
_UNLIMITED = ("--disable-frame-rate-limit", "--disable-gpu-vsync")
GRACE_S = 3.0


@dataclass(frozen=True)
class Installed:
    """A browser on this machine."""

    path: str
    draws_on_demand: bool
    """Whether it can be told when to draw a frame (only the headless shell can)."""


def find_chromium(path: str | None = None) -> Installed:
    """The browser at `path`, at `$PALAESTRA_CHROMIUM`, or the best one found; `ConfigError` when there is none."""
    asked = path or os.environ.get("PALAESTRA_CHROMIUM")
    if asked:
        found = shutil.which(asked)
        if found is None:
            place = "browser.path" if path else "PALAESTRA_CHROMIUM"
            raise ConfigError(place, asked, "is not a program that can be run", _REMEDY)
        return Installed(found, "shell" in Path(found).name)
    for name in _candidates():
        found = shutil.which(name)
        if found is not None:
            return Installed(found, "shell" in Path(found).name)
    raise ConfigError("browser", None, "no Chromium was found on this machine", _REMEDY)


def _candidates() -> Iterator[str]:
    yield from _NAMES
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright")
    for pattern in ("chromium_headless_shell-*/*/headless_shell", "chromium_headless_shell-*/*/*headless-shell"):
        yield from (str(path) for path in sorted(cache.glob(pattern), reverse=True))
    yield from (str(path) for path in sorted(cache.glob("chromium-*/*/chrome"), reverse=True))


class Chromium:
    """One running browser process and the two ends of its pipe."""

    def __init__(self, process: asyncio.subprocess.Process, profile: Path, to_it: int, from_it: int) -> None:
        self.process, self._profile = process, profile
        self.to_it, self.from_it = to_it, from_it

    @classmethod
    async def start(cls, installed: Installed) -> Chromium:
        """Start a browser with a fresh profile."""
        profile = Path(tempfile.mkdtemp(prefix="palaestra-chromium-"))
        its_in, to_it = os.pipe()
        from_it, its_out = os.pipe()
        drawing = _DRAWN_ON_DEMAND if installed.draws_on_demand else _UNLIMITED
        command = [installed.path, *_FLAGS, *drawing, f"--user-data-dir={profile}", "about:blank"]
        # The browser wants the pipe on descriptors 3 and 4, whatever they are here.
        script = f'exec 3<&{its_in} 4>&{its_out}; exec "$@"'
        try:
            process = await asyncio.create_subprocess_exec(
                "/bin/bash", "-c", script, "palaestra-chromium", *command, pass_fds=(its_in, its_out),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, "HOME": str(profile), "XDG_RUNTIME_DIR": str(profile)},
            )  # fmt: skip
        except OSError as error:
            os.close(to_it)
            os.close(from_it)
            shutil.rmtree(profile, ignore_errors=True)
            raise SessionFailed("browser_gone", f"{installed.path} could not be started ({error})") from None
        finally:
            os.close(its_in)
            os.close(its_out)
        return cls(process, profile, to_it, from_it)

    async def stop(self) -> None:
        """Kill the whole group, wait until it is gone, and remove the profile. Harmless when repeated."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self.process.wait()
        await self._until_the_group_is_gone()
        # Its last writes may race with the removal; a second look finds what they left.
        for _ in range(3):
            shutil.rmtree(self._profile, ignore_errors=True)
            if not self._profile.exists():
                return
            await asyncio.sleep(0.05)

    async def _until_the_group_is_gone(self) -> None:
        """The renderers outlive the browser by a moment; they are somebody else's children by then."""
        end = asyncio.get_running_loop().time() + GRACE_S
        while asyncio.get_running_loop().time() < end:
            if not _living(self.process.pid):
                return
            await asyncio.sleep(0.01)


def _living(group: int) -> bool:
    """Whether anybody of a process group still runs; the dead whom nobody has buried yet do not count."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    if not Path("/proc/self/stat").exists():
        return True
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # The name in brackets may hold anything; what follows it is state, parent, group.
                state, _, its_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(its_group) == group and state not in "ZX":
                    return True
    return False
