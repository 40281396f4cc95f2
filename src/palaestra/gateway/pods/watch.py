"""Following what happens to pods: listed once, then watched for as long as the gateway lives.

A watch that ends is taken up where it ended. Only when the cluster no longer knows that moment, or keeps refusing, is
everything listed again. While nothing can be heard, nothing is concluded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from palaestra.gateway.pods.api import ClusterApi
from palaestra.gateway.pods.refusal import ApiRefused, ApiTrouble, retry_in_s
from palaestra.gateway.pods.status import Pod, read_pod

__all__ = ["Listener", "PodWatch", "Step", "next_step"]

_log = logging.getLogger(__name__)

RELIST_AFTER = 3
"""Refusals in a row after which the moment to go on from is not trusted any more."""
QUICK_S = 1.0
"""A watch that ends sooner without any news was as good as refused."""


class Listener(Protocol):
    """Who wants to know."""

    def listing(self) -> None:
        """Everything is about to be listed; what is made from here on may not be on that list."""

    def listed(self, pods: Sequence[Pod]) -> None:
        """These are all the pods there are."""

    def heard(self, pod: Pod, *, deleted: bool) -> None:
        """Something happened to a pod."""


@dataclass(frozen=True)
class Step:
    """What to do when a watch has ended."""

    relist: bool
    wait_s: float


def next_step(trouble: ApiTrouble | None, failures: int) -> Step:
    """After a watch ended, by itself or in trouble, `failures` in a row, this one included."""
    if trouble is None:
        return Step(relist=False, wait_s=retry_in_s(None, failures) if failures > 1 else 0.0)
    if isinstance(trouble, ApiRefused) and trouble.status == 410:
        return Step(relist=True, wait_s=retry_in_s(trouble, failures) if failures > 1 else 0.0)
    return Step(isinstance(trouble, ApiRefused) and failures >= RELIST_AFTER, retry_in_s(trouble, failures))


class PodWatch:
    """Tells a listener about every pod with certain labels."""

    def __init__(self, api: ClusterApi, selector: str, listener: Listener) -> None:
        self._api, self._selector, self._listener = api, selector, listener
        self._version: str | None = None
        self.relists = 0
        self.hears = True
        """False while the cluster does not answer."""

    async def begin(self) -> None:
        """List once; raises what is answered instead."""
        await self._list()

    async def follow(self) -> None:
        """Listen until cancelled."""
        clock = asyncio.get_running_loop().time
        failures = 0
        while True:
            trouble: ApiTrouble | None = None
            begun, before = clock(), self._version
            try:
                if self._version is None:
                    await self._list()
                    self.relists += 1
                await self._watch()
            except ApiTrouble as error:
                trouble = error
            except (KeyError, TypeError, AttributeError) as error:
                # Whatever stands between us and the cluster said it; to be deaf from here on would be worse.
                trouble = ApiRefused(500, "Unreadable", f"an answer could not be read ({error!r})")
            self._note(trouble)
            useful = self._version not in (None, before) or (trouble is None and clock() - begun > QUICK_S)
            failures = 0 if useful else failures + 1
            step = next_step(trouble, failures + 1 if useful else failures)
            if step.relist:
                self._version = None
            await asyncio.sleep(step.wait_s)

    async def _list(self) -> None:
        self._listener.listing()
        documents, version = await self._api.pods(self._selector)
        self._listener.listed([read_pod(document) for document in documents])
        self._version = version

    async def _watch(self) -> None:
        assert self._version is not None
        async with self._api.watched_pods(self._selector, self._version) as events:
            self._note(None)
            async for kind, document in events:
                self._version = document["metadata"]["resourceVersion"]
                if kind != "BOOKMARK":
                    self._listener.heard(read_pod(document), deleted=kind == "DELETED")

    def _note(self, trouble: ApiTrouble | None) -> None:
        # That a list has to be made again is the cluster's ordinary way of saying that we were away for long.
        hears = trouble is None or (isinstance(trouble, ApiRefused) and trouble.status == 410)
        if self.hears and not hears:
            _log.warning("the cluster's API does not answer (%s); sessions go on, trying again", trouble)
        if hears and not self.hears:
            _log.warning("the cluster's API answers again")
        self.hears = hears
