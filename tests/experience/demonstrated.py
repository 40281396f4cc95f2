"""Demonstrations of `fake/button` by an oracle that clicks the middle of the square, and of the toy game."""

import asyncio

from palaestra.experience.demonstrations import Demonstrations, DemonstrationWriter
from palaestra.sessions.action import Click, Point
from palaestra.sessions.fake import BUTTON, FakeSession
from palaestra.train.demonstrations.record import record_oracles


class OracleSession(FakeSession):
    """A session without a browser, and an oracle with the method of `BrowserSession`."""

    async def oracle_action(self):
        if self._clicked is not None:
            return None
        left, top = self._corner(self._require_episode().spec.seed)
        return Click(Point(left + BUTTON // 2, top + BUTTON // 2))


def record(config, policy, path, episodes, *, session=OracleSession, **more):
    async def open_session():
        return session()

    return asyncio.run(record_oracles(config, policy, path, episodes=episodes, open_session=open_session, **more))


def write(path, trajectories, prompt_format=None):
    """A directory of demonstrations with exactly these trajectories."""
    writer = DemonstrationWriter(path, prompt_format or {"codec": "toy"})
    for one in trajectories:
        writer.add(one)
    return Demonstrations(path)
