"""`palaestra studio` as the command starts it, until the window is painted; started by `benchmarks.studio`.

    python -m benchmarks.studio_start STARTED

STARTED is the monotonic time of the start of the process. Imports nothing before the command does, because the order of
imports is a part of what is measured. Prints the result as a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.util import find_spec
from typing import Any

_MODULE = "palaestra.studio.qt.application"
_HEAVY = ("torch", "scipy", "matplotlib", "OpenGL", "pandas", "numba", "gymnasium", "fastapi", "pyqtgraph", "numpy")
result: dict[str, Any] = {}


class ApplicationImport:
    """Finds the module that opens the window, and changes it so that the first paint is noted."""

    def __init__(self, started: float) -> None:
        self._started = started

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            note_first_paint(module, self._started)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def note_first_paint(module: Any, started: float) -> None:
    """Note the times around the creation and the first paint of the window, then close it."""
    from PySide6.QtCore import QEvent, QObject, QTimer

    create = module.create_window

    class FirstPaint(QObject):
        def eventFilter(self, window: Any, event: QEvent) -> bool:  # noqa: N802 - Qt calls it
            if event.type() == QEvent.Type.Paint and "first_paint_s" not in result:
                result["first_paint_s"] = 0.0
                # The paint of a window ends before the next event.
                QTimer.singleShot(0, self, lambda: finish(window))
            return False

    def finish(window: Any) -> None:
        result["first_paint_s"] = time.monotonic() - started
        result["cpu_s"] = time.process_time()
        result["heavy_modules"] = [name for name in _HEAVY if name in sys.modules]
        result["modules"] = len(sys.modules)
        window.close()

    def create_window(*arguments: Any) -> Any:
        result["imported_s"] = time.monotonic() - started
        window = create(*arguments)
        result["created_s"] = time.monotonic() - started
        window.installEventFilter(FirstPaint(window))
        return window

    module.create_window = create_window


def main() -> None:
    sys.meta_path.insert(0, ApplicationImport(float(sys.argv[1])))  # type: ignore[arg-type]
    from palaestra.cli import main as run_command

    sys.argv = ["palaestra", "studio"]
    try:
        run_command()
    except SystemExit as ended:
        if ended.code:
            raise
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
