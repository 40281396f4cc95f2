"""Installs the wheel into an empty virtual environment outside the checkout, and runs every command there.

`python -m tests.smoke.installed_wheel` checks the bare install first: what it can do works, and what needs an extra
answers with the command that installs it. Then it installs the extras and checks what they add. No command may print a
traceback. Needs the package index; takes about ten minutes with a warm cache of pip. `--demo` adds `palaestra demo`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS = "ui,vlm,serve,studio,box2d,mujoco,offline,video,tensorboard,sweeps"
LIST_COMMANDS = """
import json
from palaestra.cli.app import COMMANDS, Group
words = [[]]
for name, entry in COMMANDS.items():
    words.append([name])
    words += [[name, sub] for sub in entry.commands] if isinstance(entry, Group) else []
print(json.dumps(words))
"""
TRAINER = """
import palaestra.log
for step in range(20):
    palaestra.log.step(step, loss=1 / (step + 1))
"""


@dataclass(frozen=True)
class Check:
    """A command line with its expected exit code and a text of its output."""

    command: str
    contains: str = ""
    code: int = 0
    stdin: str = ""
    timeout_s: float = 300.0


def _needs(command: str, *extras: str) -> Check:
    return Check(command, f"pip install 'palaestra[{','.join(extras)}]'", code=2)


BARE = (
    Check("palaestra --version", "palaestra 0."),
    Check("palaestra", "palaestra train cartpole", code=2),
    Check("palaestra train --list", "cartpole"),
    Check("palaestra train cartpole --num-steps 8192 --json", '"steps": 8192'),
    Check("palaestra train CartPole-v1 --num-steps 8192 trainer.rollout_length=128", "Evaluate with: palaestra eval"),
    Check("palaestra train dqn_cartpole --num-steps 2000", "Done after"),
    Check("palaestra train taxi --num-steps 20000", "Done after"),
    Check("palaestra train table_reach --num-steps 2048", "Done after"),
    Check("palaestra train cartpol", "Did you mean 'cartpole'?", code=2),
    Check("palaestra eval RUN --episodes 10", "mean return"),
    Check("palaestra demo cartpole", "after   mean return"),
    Check("palaestra plan click_target", "Limited by"),
    Check("palaestra envs CartPole", "CartPole-v1"),
    Check("palaestra tasks", "click_target/button"),
    Check("palaestra runners", "cleanrl"),
    Check("palaestra schema ui", "model"),
    Check("palaestra runs list", "cartpole"),
    Check("palaestra runs show RUN", "RUN"),
    Check("palaestra checkpoints list", "cartpole"),
    Check("palaestra sweeps list", "No sweeps yet"),
    Check("palaestra datasets list", "No datasets yet"),
    Check("palaestra episodes list", "No episodes yet"),
    Check("palaestra doctor", "extra:serve"),
    Check("bash -c 'HOME=$PWD palaestra --install-completion; exit $?'", "completion installed"),
    Check("env _PALAESTRA_COMPLETE=complete_bash COMP_WORDS='palaestra train cart' COMP_CWORD=2 palaestra", "cartpole"),
    Check("palaestra sessions try click_target/button", "Screen of", stdin="quit\n"),
    _needs("palaestra demo", "ui", "vlm"),
    _needs("palaestra train click_target", "vlm", "ui"),
    _needs("palaestra demos record click_target --episodes 1 --output demos", "vlm", "ui"),
    _needs("palaestra tiny-vlm info", "vlm"),
    _needs("palaestra runs start cartpole", "serve"),
    _needs("palaestra runs start -- python train.py", "serve"),
    _needs("palaestra runs open", "serve"),
    _needs("palaestra serve", "serve"),
    _needs("palaestra gateway", "ui"),
    _needs("palaestra studio", "studio"),
    _needs("palaestra sessions try miniwob/click-button", "ui"),
    _needs("palaestra train lunarlander", "box2d"),
    _needs("palaestra train hopper", "mujoco"),
    _needs("palaestra train cartpole env.backend=envpool", "envpool"),
    _needs("palaestra train cartpole telemetry.tensorboard=true", "tensorboard"),
    _needs("palaestra train cartpole telemetry.wandb=offline", "wandb"),
    _needs("palaestra train cartpole actors.backend=ray", "ray"),
    _needs("palaestra datasets create pendulum/medium-v0 --env Pendulum-v1 --steps 500", "offline"),
    _needs("palaestra datasets download D4RL/door/human-v2", "offline"),
    _needs("palaestra eval RUN --episodes 1 --video clip.mp4", "video"),
)
WITH_EXTRAS = (
    Check("palaestra runs start cartpole --follow trainer.total_timesteps=8192", "succeeded"),
    Check("palaestra runs start --follow -- python train.py", "succeeded"),
    Check("palaestra runs start cartpole --seeds 1..2 --follow trainer.total_timesteps=4096", "succeeded"),
    Check("palaestra sweeps list", "cartpole"),
    Check("palaestra runs list", "succeeded"),
    Check("palaestra serve --stop", "The service has exited"),
    Check("palaestra tasks click-button", "miniwob/click-button"),
    Check("palaestra sessions try miniwob/click-button", "Screen of", stdin="quit\n"),
    Check("palaestra train click_target --num-steps 1 trainer.batch_size=8", "Done after", timeout_s=600),
    Check("palaestra demos record click_target --episodes 2 --output demos", "2 demonstrations written"),
    Check("palaestra tiny-vlm info tiny-reader", "weights"),
    Check("palaestra train lunarlander --num-steps 16384", "Done after"),
    Check("palaestra train hopper --num-steps 2048", "Done after"),
    Check("palaestra train cartpole --num-steps 4096 telemetry.tensorboard=true", "Done after"),
    Check("palaestra datasets create pendulum/medium-v0 --env Pendulum-v1 --steps 500", "pendulum/medium-v0"),
    Check("palaestra train bc_pendulum trainer.updates=200", "Done after"),
    Check("palaestra eval RUN --episodes 1 --video clip.mp4", "frames"),
    Check("palaestra studio --screenshot studio.png"),
    Check("palaestra doctor", "qt"),
    Check("palaestra serve --stop"),
)
DEMO = Check("palaestra demo", "success rate", timeout_s=1800)


class SmokeTest:
    """A virtual environment with the wheel, and a directory to run commands in."""

    def __init__(self, directory: Path, python: str, constraints: Path) -> None:
        self.venv, self.work = directory / "venv", directory / "work"
        self._wheel = _build_wheel(directory / "wheel")
        self._constraints, self._run_id = constraints, ""
        self.failures: list[str] = []
        self.work.mkdir()
        (self.work / "train.py").write_text(TRAINER)
        subprocess.run([python, "-m", "venv", str(self.venv)], check=True)

    def install(self, extras: str = "") -> None:
        """Install torch first, as pinned: where the index has a build for the CPU, it is not replaced later."""
        start = time.monotonic()
        for package in ("torch==2.13.0", f"{self._wheel}{f'[{extras}]' if extras else ''}"):
            command = [str(self.venv / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*command, "--constraint", str(self._constraints), package], check=True, cwd=self.work)
        size = sum(path.stat().st_size for path in self.venv.rglob("*") if path.is_file() and not path.is_symlink())
        print(f"installed [{extras}] in {time.monotonic() - start:.0f} s; {size / 1e9:.2f} GB on disk", flush=True)

    def check_help(self) -> None:
        """Every command and subcommand explains itself."""
        python = str(self.venv / "bin" / "python")
        listing = subprocess.run(
            [python, "-c", LIST_COMMANDS], check=True, capture_output=True, text=True, env=self._environment()
        )
        for words in json.loads(listing.stdout):
            self.check(Check(shlex.join(["palaestra", *words, "--help"]), "Usage: palaestra"))

    def check(self, check: Check) -> None:
        """Run one command and compare; RUN stands for the first run that was trained."""
        command = check.command.replace("RUN", self._run_id or "RUN")
        start = time.monotonic()
        code, output = self._run(command, check)
        problem = _find_problem(check, code, output, self._run_id)
        print(f"{'FAILED' if problem else 'ok':<6} {time.monotonic() - start:6.1f} s  {command}", flush=True)
        if problem:
            self.failures.append(command)
            print(f"       {problem}\n{output[-2000:]}", flush=True)
        elif not self._run_id and '"run_id"' in output:
            self._run_id = json.loads(output[output.index("{") :])["run_id"]

    def _run(self, command: str, check: Check) -> tuple[int, str]:
        # A process group of its own, so that a command that hangs is ended with its children.
        process = subprocess.Popen(
            shlex.split(command),
            cwd=self.work,
            env=self._environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(check.stdin, timeout=check.timeout_s)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return -1, f"{output}\n(no end after {check.timeout_s:.0f} s)"

    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PALAESTRA_"))}
        path = f"{self.venv / 'bin'}{os.pathsep}{kept.get('PATH', '')}"
        return {**kept, "PATH": path, "QT_QPA_PLATFORM": "offscreen", "COLUMNS": "120"}


def _find_problem(check: Check, code: int, output: str, run_id: str) -> str:
    if "Traceback (most recent call last)" in output:
        return "printed a traceback"
    if code != check.code:
        return f"exit code {code}, expected {check.code}"
    expected = check.contains.replace("RUN", run_id or "RUN")
    return "" if expected in output else f"does not say {expected!r}"


def _build_wheel(directory: Path) -> Path:
    """The wheel of this checkout, built from a copy."""
    copy = directory / "checkout"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".venv*", "var", ".git", "build", ".*_cache")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "-w"]
    subprocess.run([*command, str(directory), str(copy)], check=True)
    (wheel,) = directory.glob("*.whl")
    return wheel


def main() -> int:
    """Run all checks; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the virtual environment")
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt", help="file for pip --constraint")
    parser.add_argument("--demo", action="store_true", help="also train the UI agent of `palaestra demo` (minutes)")
    parser.add_argument("--bare", action="store_true", help="check the install without extras only")
    parser.add_argument("--keep", type=Path, help="new directory for the virtual environment, kept afterwards")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="palaestra-smoke-") as temporary:
        directory = options.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=options.keep is None)
        smoke = SmokeTest(directory, options.python, options.constraints)
        smoke.install()
        smoke.check_help()
        for check in BARE:
            smoke.check(check)
        if not options.bare:
            smoke.install(EXTRAS)
            for check in (*WITH_EXTRAS, *((DEMO,) if options.demo else ())):
                smoke.check(check)
    print(f"{len(smoke.failures)} failed: {'; '.join(smoke.failures)}" if smoke.failures else "all passed")
    return 1 if smoke.failures else 0


if __name__ == "__main__":
    sys.exit(main())
