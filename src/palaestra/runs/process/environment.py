"""The environment a trainer gets: built from a list of names, never inherited whole.

What is not on the list stays with the service: its token, the shell's other secrets, PYTHONPATH and its like.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from palaestra.runs.runner import Machine, Place
from palaestra.runs.spec import RunSpec

__all__ = ["passed_on", "trainer_environment"]

_PASSED = re.compile(
    r"(?:PATH|HOME|USER|LOGNAME|LANG|LC_\w+|TZ|SHELL|LD_LIBRARY_PATH|SSL_CERT_\w+|\w+_PROXY|XDG_CACHE_HOME|DISPLAY"
    r"|WAYLAND_DISPLAY|(?:OMP|MKL|OPENBLAS|NUMBA|CUDA|NVIDIA|TORCH|HF|WANDB|MUJOCO|MINARI|JAX|XLA)_?\w*)",
    re.IGNORECASE,
)


def passed_on(machine: Machine) -> dict[str, str]:
    """What a trainer, or a look at its interpreter, may know of the service's own environment."""
    return {name: value for name, value in machine.environment.items() if _PASSED.fullmatch(name)}


def trainer_environment(
    spec: RunSpec, place: Place, machine: Machine, further: Mapping[str, str] | None = None
) -> dict[str, str]:
    """All variables of one attempt; what the runner itself needs (`further`) is stronger than what the spec wishes."""
    own = dict(further or {})
    if "PYTHONPATH" in own and "PYTHONPATH" in spec.environment:
        own["PYTHONPATH"] += f":{spec.environment['PYTHONPATH']}"
    return {
        # Two runs on two cores with a thread per core each are slower than two runs with one thread.
        "OMP_NUM_THREADS": "1",
        # The numbers of the leased GPUs are those of the driver's tool; CUDA would count the fastest first.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        **passed_on(machine),
        # Output that waits in a buffer is output that a crash loses.
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",
        # SDL would take SIGTERM for itself once something was rendered, and the trainer could not be asked to stop.
        "SDL_NO_SIGNAL_HANDLERS": "1",
        "SDL_VIDEODRIVER": "dummy",
        "TMPDIR": str(place.attempt_dir / "tmp"),
        "PALAESTRA_HOME": str(place.run_dir.parents[3]),
        "CUDA_VISIBLE_DEVICES": ",".join(machine.gpus[: spec.gpus]),
        **spec.environment,
        **own,
    }
