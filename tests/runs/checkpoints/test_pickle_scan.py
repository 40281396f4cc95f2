import collections
import contextlib
import io
import pickle
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.runs.checkpoints import evil

from palaestra.runs.checkpoints.pickle_scan import _CALLABLE, _VALUES, UnsafePickle, check_pickle, scan

PICKLES = sorted(evil.pickles("x"))


@pytest.mark.parametrize("name", evil.RUNS)
def test_the_corpus_is_evil_and_python_itself_proves_it(name, tmp_path):
    canary, file = tmp_path / "canary", tmp_path / "evil.pkl"
    file.write_bytes(evil.pickles(canary)[name])

    code = "import pickle,sys; pickle.load(open(sys.argv[1], 'rb'))"
    # A session of its own and an end of output that all of its children share: it is over when they are.
    process = subprocess.Popen([sys.executable, "-c", code, str(file)], cwd=tmp_path, stdout=subprocess.PIPE, stderr=-2)
    process.communicate(timeout=60)

    assert canary.exists()


@pytest.mark.parametrize("name", PICKLES)
def test_an_evil_pickle_is_refused_and_never_runs_bare_or_inside_a_torch_zip(name, tmp_path):
    canary = tmp_path / "canary"
    content = evil.pickles(canary)[name]
    bare = tmp_path / "evil.pkl"
    bare.write_bytes(content)
    packed = evil.rewritten(
        evil.torch_zip(tmp_path / "evil.pt"), lambda members: evil.swapped(members, "data.pkl", content)
    )

    for path in (bare, packed):
        report = scan(path)
        assert not report.safe
        assert report.reason
    with pytest.raises(UnsafePickle):
        check_pickle(content)
    assert not canary.exists()


def test_the_reason_names_what_would_be_imported(tmp_path):
    with pytest.raises(UnsafePickle, match=r"it would import posix\.system"):
        check_pickle(evil.pickles(tmp_path / "canary")["reduce_protocol_4"])


def test_zips_that_two_readers_could_read_differently_are_refused(tmp_path):
    canary = tmp_path / "canary"
    made = evil.archives(tmp_path, canary)

    reports = {name: scan(path) for name, path in made.items()}

    assert [name for name, report in reports.items() if report.safe] == []
    assert all(report.reason for report in reports.values())
    assert "leaves its directory" in reports["leaves_its_directory"].reason
    assert "swell" in reports["bomb"].reason
    assert "in front" in reports["pickle_in_front"].reason or reports["pickle_in_front"].format == "pickle"
    assert "behind its end" in reports["bytes_behind"].reason
    assert "encrypted" in reports["encrypted"].reason
    assert reports["legacy"].format == "pickle"
    assert "torch.nn.modules.linear.Linear" in reports["whole_module"].reason
    assert not canary.exists()


def test_two_members_of_one_name_are_refused(tmp_path):
    path = evil.torch_zip(tmp_path / "twice.pt")
    with zipfile.ZipFile(path) as archive:
        name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, evil.pickles(tmp_path / "canary")["eval"])

    assert "two members have one name" in scan(path).reason


@pytest.mark.parametrize(
    "content",
    [
        torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict(),
        {"model": {"w": torch.zeros(2, dtype=torch.bfloat16)}, "step": 3, "lr": 0.1, "names": ["a", ("b", None, True)]},
        {"optimizer": torch.optim.Adam(torch.nn.Linear(2, 2).parameters()).state_dict(), "shape": torch.Size([1, 2])},
        {"parameter": torch.nn.Parameter(torch.ones(2)), "set": {1, 2}},
        {
            "numpy": np.arange(6.0).reshape(2, 3),
            "scalar": np.float32(1.5),
            "int": np.arange(3),
        },
    ],
    ids=["state_dict", "nested", "optimizer", "parameter", "numpy"],
)
def test_what_weights_are_made_of_is_accepted(content, tmp_path):
    path = tmp_path / "weights.pt"
    torch.save(content, path)

    report = scan(path)

    assert (report.safe, report.format, report.reason) == (True, "torch_zip", "")
    assert all(
        name.split(".")[0] in ("torch", "collections", "numpy", "_codecs", "__builtin__") for name in report.globals
    )


def test_safetensors_are_accepted_and_damaged_ones_are_not(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"a": torch.zeros(3), "b": torch.ones(2, 2)}, path, metadata={"x": "y"})
    whole = path.read_bytes()

    assert scan(path).safe
    assert scan(path).format == "safetensors"
    for damaged in (whole[:-1], whole + b"x", whole.replace(b"[12,28]", b"[11,28]"), b"\xff" * 8 + whole[8:]):
        path.write_bytes(damaged)
        assert not scan(path).safe


def test_of_a_stable_baselines3_zip_the_weights_decide(tmp_path):
    canary = tmp_path / "canary"

    fine = scan(evil.sb3_zip(tmp_path / "a.zip", canary))
    bad = scan(evil.sb3_zip(tmp_path / "b.zip", canary, evil_weights=True))

    assert (fine.safe, fine.format) == (True, "sb3_zip")
    assert (bad.safe, bad.format) == (False, "sb3_zip")
    assert "posix.system" in bad.reason
    assert not canary.exists()


def test_something_else_is_no_checkpoint(tmp_path):
    path = tmp_path / "readme.txt"
    path.write_text("hello")

    assert scan(path).format == "unknown"


class _Recording(pickle.Unpickler):
    """Loads for real, but imports nothing that is not on the list, and says so."""

    def __init__(self, data):
        super().__init__(io.BytesIO(data))
        self.strangers = []

    def find_class(self, module, name):
        if (module, name) not in _VALUES | _CALLABLE:
            self.strangers.append(f"{module}.{name}")
            raise pickle.UnpicklingError("a stranger")
        return lambda *arguments: collections.OrderedDict()

    def persistent_load(self, pid):
        return None


SEEDS = [
    pickle.dumps(collections.OrderedDict(a=[1, 2.0, "x", (None, b"y")], b={"c": {1}}), protocol)
    for protocol in (2, 4, 5)
] + [content for content in evil.pickles("/nonexistent/canary").values() if content]


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")  # what Python says of some of them
@settings(max_examples=600, deadline=None)
@given(st.sampled_from(SEEDS), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6), st.data())
def test_a_pickle_that_is_accepted_never_asks_for_a_stranger(seed, changes, data):
    mutated = bytearray(seed)
    for at, byte in changes:
        mutated[at % len(mutated)] = byte
    cut = data.draw(st.integers(0, len(mutated)))
    splice = data.draw(st.sampled_from([b"", *SEEDS]))
    mutated = bytes(mutated[:cut]) + splice[cut:] + bytes(mutated[cut:])

    try:
        check_pickle(mutated)
    except UnsafePickle:
        return
    loader = _Recording(mutated)
    with contextlib.suppress(Exception):  # it may fail in any way; what it asks for is the question
        loader.load()
    assert loader.strangers == []
