"""Repositories for tests, with an identity of their own."""

import os
import subprocess

_ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    **{f"GIT_{role}_NAME": "A" for role in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{role}_EMAIL": "a@b.c" for role in ("AUTHOR", "COMMITTER")},
}


def git(directory, *words):
    done = subprocess.run(["git", "-C", str(directory), *words], env=_ENVIRONMENT, capture_output=True, check=True)
    return done.stdout.decode().strip()


def make_repository(directory, **files):
    """A repository with one commit of these files; `__` in a name is a dot."""
    directory.mkdir(parents=True, exist_ok=True)
    git(directory, "init", "-q", "-b", "main")
    git(directory, "config", "core.compression", "0")
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)
    commit(directory, "First")
    return directory


def commit(directory, message):
    git(directory, "add", "-A")
    git(directory, "commit", "-q", "-m", message)
    return git(directory, "rev-parse", "HEAD")
