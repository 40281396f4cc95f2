"""A session server whose steps take as long as those of a remote screen: `fake/button`, and no core is busy meanwhile.

`python -m benchmarks.slow_sessions SECONDS VARIATION --port PORT --until-eof`; the rest are options of
`palaestra.sessions.server`.
"""

from __future__ import annotations

import asyncio
import random
import sys
from typing import Any

from palaestra.sessions.fake import FakeSession
from palaestra.sessions.server import process

SECONDS, VARIATION = (float(word) for word in sys.argv[1:3]) if len(sys.argv) > 2 else (0.0, 0.0)


class SlowSession(FakeSession):
    """Acts after a delay drawn from a gamma distribution."""

    async def act(self, *args: Any, **kwargs: Any) -> Any:
        shape = VARIATION**-2 if VARIATION else 0.0
        await asyncio.sleep(random.gammavariate(shape, SECONDS / shape) if shape else SECONDS)
        return await super().act(*args, **kwargs)


if __name__ == "__main__":
    process.FakeSession = SlowSession  # type: ignore[misc]
    raise SystemExit(process.main([*sys.argv[3:], "--fake"]))
