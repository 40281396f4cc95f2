"""The images of the test node, built with podman from the Dockerfiles in `deploy/`, where no image registry is reached.

The base that the Dockerfiles name is made by debootstrap and given that name; wheels are fetched by this machine's pip
and handed to the build as its only index. Everything lies in the node's directory and can be thrown away with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SUITE = "bookworm"
BASE = f"docker.io/library/debian:{SUITE}-slim"
IMAGES = ("session", "gateway")
PAUSE = "localhost/pause:1"

CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
"""
"""Limits that a machine without CAP_SYS_RESOURCE may set, and a runtime that copes with both versions of cgroups."""


def tag(image: str) -> str:
    """What an image is called on the node; the overlay `local-image` names it so."""
    return f"localhost/palaestra-{image}:dev"


class Podman:
    """A podman whose images and settings lie in one directory."""

    def __init__(self, state: Path) -> None:
        self.state = state
        state.mkdir(parents=True, exist_ok=True)
        (state / "containers.conf").write_text(CONTAINERS_CONF)
        (state / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}\n')

    def __call__(self, *arguments: str | Path, **settings: object) -> subprocess.CompletedProcess[bytes]:
        storage = ("--root", self.state / "podman", "--runroot", self.state / "podman-run")
        command = [str(part) for part in ("podman", *storage, "--storage-driver", "overlay", *arguments)]
        environment = {**os.environ, "CONTAINERS_CONF": str(self.state / "containers.conf")}
        return subprocess.run(command, env=environment, check=True, **settings)

    def has(self, image: str) -> bool:
        """Whether it has been made."""
        try:
            self("image", "exists", image)
        except subprocess.CalledProcessError:
            return False
        return True

    def size(self, image: str) -> int:
        """Bytes of all its layers."""
        found = self("image", "inspect", "--format", "{{.Size}}", image, stdout=subprocess.PIPE)
        return int(found.stdout)


def package_sources() -> dict[str, str]:
    """Where this machine gets Debian's packages from, by suite: the image gets them from there, too."""
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME) $(COMPONENT)", "Identifier: Packages"]
    lines = subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    found = [line.split() for line in lines]
    return {suite: uri for uri, suite, part in found if part == "main" and suite.partition("-")[0] == SUITE}


def make_base(podman: Podman) -> None:
    """A minimal Debian under the name that the Dockerfiles begin from."""
    if podman.has(BASE):
        return
    sources = package_sources()
    tree = podman.state / "base"
    shutil.rmtree(tree, ignore_errors=True)
    subprocess.run(["debootstrap", "--variant=minbase", SUITE, tree, sources[SUITE]], check=True)
    (tree / "etc/apt/sources.list").write_text("".join(f"deb {uri} {suite} main\n" for suite, uri in sources.items()))
    for left in ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale"):
        shutil.rmtree(tree / left, ignore_errors=True)
    (tree / "var/lib/apt/lists/partial").mkdir(parents=True)
    (tree / "var/cache/apt/archives/partial").mkdir(parents=True)
    _imported(podman, tree, BASE, "CMD /bin/bash")
    shutil.rmtree(tree)


def make_pause(podman: Podman) -> None:
    """The process that holds a pod's namespaces: Debian's catatonit is one, and needs no file beside itself."""
    if podman.has(PAUSE):
        return
    tree = podman.state / "pause"
    tree.mkdir(exist_ok=True)
    shutil.copy("/usr/bin/catatonit", tree / "pause")
    _imported(podman, tree, PAUSE, 'ENTRYPOINT ["/pause", "-P"]')
    shutil.rmtree(tree)


def _imported(podman: Podman, tree: Path, name: str, change: str) -> None:
    with subprocess.Popen(["tar", "--directory", tree, "--create", "."], stdout=subprocess.PIPE) as tar:
        path = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        podman("import", "--change", path, "--change", change, "-", name, stdin=tar.stdout)


def fetch_wheels(state: Path) -> Path:
    """What the Dockerfiles install, fetched here: a build need not know how this machine reaches an index."""
    wheels = state / "wheels"
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", wheels]
    download += ["--constraint", ROOT / "constraints.txt", "--only-binary", ":all:"]
    lists = [part for image in IMAGES for part in ("--requirement", DEPLOY / f"{image}.txt")]
    subprocess.run([*download, *lists, "setuptools>=77", "wheel"], check=True)
    subprocess.run([*download, "--no-deps", "miniwob"], check=True)
    (state / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    return wheels


def build(podman: Podman, image: str, wheels: Path) -> None:
    """One image from its Dockerfile, with the network of this machine (for apt) and our wheels."""
    podman(
        "build", "--network", "host", "--file", DEPLOY / f"{image}.Dockerfile", "--tag", tag(image),
        "--volume", f"{wheels}:/wheels:ro", "--volume", f"{podman.state / 'pip.conf'}:/etc/pip.conf:ro", ROOT,
    )  # fmt: skip


def make_images(state: Path) -> dict[str, int]:
    """Every image a node needs, and how large each is."""
    podman = Podman(state)
    make_base(podman)
    make_pause(podman)
    wheels = fetch_wheels(state)
    for image in IMAGES:
        build(podman, image, wheels)
    return {name: podman.size(name) for name in (PAUSE, BASE, *(tag(image) for image in IMAGES))}
