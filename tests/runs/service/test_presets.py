"""Presets: named values of forms, by kind, stored atomically and within limits."""

import json

import pytest

from palaestra.errors import ConfigError, UnknownRun
from palaestra.files.home import Home
from palaestra.runs import presets
from palaestra.runs.presets import delete_preset, list_presets, save_preset

VALUES = {"steps": 300, "nested": {"lr": 0.001, "layers": [64, 64]}, "note": "ü", "none": None}


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "var" / "training")


def test_presets_are_saved_listed_by_kind_replaced_and_deleted(served):
    trainer = served.trainer
    before = trainer.save_preset("train/cleanrl/dqn", "Quick look", VALUES)
    assert (before.kind, before.name, before.values) == ("train/cleanrl/dqn", "Quick look", VALUES)
    trainer.save_preset("train/cleanrl/dqn", "a long one", {"steps": 10**6})
    trainer.save_preset("train/cleanrl/ppo", "Quick look", {"steps": 1})
    trainer.save_preset("use", "Quick look", {"deterministic": True})
    assert [preset.name for preset in trainer.presets("train/cleanrl/dqn")] == ["a long one", "Quick look"]
    assert [preset.values for preset in trainer.presets("train/cleanrl/ppo")] == [{"steps": 1}]
    assert [(preset.kind, preset.name) for preset in trainer.presets()] == [
        ("train/cleanrl/dqn", "a long one"),
        ("train/cleanrl/dqn", "Quick look"),
        ("train/cleanrl/ppo", "Quick look"),
        ("use", "Quick look"),
    ]
    after = trainer.save_preset("train/cleanrl/dqn", "Quick look", {"steps": 5})
    assert after.saved >= before.saved
    assert [preset.values for preset in trainer.presets("train/cleanrl/dqn")] == [{"steps": 10**6}, {"steps": 5}]
    assert trainer.delete_preset("train/cleanrl/dqn", "Quick look").values == {"steps": 5}
    with pytest.raises(UnknownRun, match="no such preset"):
        trainer.delete_preset("train/cleanrl/dqn", "Quick look")
    assert [preset.name for preset in trainer.presets("train/cleanrl/dqn")] == ["a long one"]
    assert trainer.presets("train/sb3/ppo") == []


@pytest.mark.parametrize("name", ["50 % faster", "α", ".", "..", ".hidden", "a#b?c", "con", "x.json", "A", "a" * 80])
def test_any_line_of_text_is_a_name(served, name):
    served.trainer.save_preset("names", name, {"name": name})
    assert [preset.name for preset in served.trainer.presets("names")] == [name]
    assert served.trainer.delete_preset("names", name).values == {"name": name}
    assert served.trainer.presets("names") == []


def test_nothing_is_written_outside_the_directory_of_presets(home, tmp_path):
    for kind, name in (
        ("../x", "a"),
        ("a/../../b", "x"),
        ("/etc", "x"),
        ("a//b", "x"),
        ("a/b/c/d/e", "x"),
        (".a", "x"),
        ("", "x"),
        ("k" * 64, "x"),
        ("train", "../x"),
        ("train", "a/b"),
        ("train", ""),
        ("train", " x"),
        ("train", "x "),
        ("train", "two\nlines"),
        ("train", "x" * 81),
        ("train", "\U0001f600" * 60),
        ("train", "\ud800"),
    ):
        with pytest.raises(ConfigError, match=r"^(kind|name) = "):
            save_preset(home, kind, name, {}, lambda: 0.0)
        with pytest.raises(ConfigError):
            delete_preset(home, kind, name)
    assert list(tmp_path.iterdir()) == []


def test_values_that_cannot_be_stored_are_refused_and_the_earlier_ones_stay(home):
    save_preset(home, "train", "mine", {"steps": 1}, lambda: 5.0)
    for values, reason in (
        ({"steps": float("nan")}, "steps: is not a finite number"),
        ({"text": "\ud800"}, "not valid UTF-8"),
        ({"big": 10**30}, "beyond 64 bits"),
        ({"hub": {"api_key": "abc"}}, "password or token"),
        ({"url": "https://me:secret@example.org"}, "password or token"),
        ({"text": "x" * 300_000}, "are longer than 262,144 bytes"),
    ):
        with pytest.raises(ConfigError, match=reason):
            save_preset(home, "train", "mine", values, lambda: 6.0)
    (preset,) = list_presets(home, "train")
    assert (preset.values, preset.saved) == ({"steps": 1}, 5.0)


def test_the_number_of_presets_of_a_kind_is_limited(home, monkeypatch):
    monkeypatch.setattr(presets, "_MAX_PRESETS", 2)
    for name in ("a", "b", "a"):
        save_preset(home, "train", name, {}, lambda: 0.0)
    with pytest.raises(ConfigError, match="there are 2 presets of train"):
        save_preset(home, "train", "c", {}, lambda: 0.0)
    save_preset(home, "other", "c", {}, lambda: 0.0)


def test_damaged_and_foreign_files_are_left_out_with_a_warning(home, caplog):
    save_preset(home, "train", "good", {"a": 1}, lambda: 0.0)
    directory = home.presets / "train"
    (directory / "torn.json").write_text('{"schema": 1, "kind": "tra')
    (directory / "renamed.json").write_text((directory / "good.json").read_text())
    (directory / "list.json").write_text("[]")
    (directory / "odd.json").write_text(json.dumps({"kind": "train", "name": "odd", "values": 3, "saved": 1}))
    (directory / ".good.json.123.tmp").write_text("{}")
    assert [preset.name for preset in list_presets(home, "train")] == ["good"]
    assert len(caplog.messages) == 4
    assert delete_preset(home, "train", "torn").values == {}
    assert not (directory / "torn.json").exists()


def test_a_preset_whose_write_is_interrupted_keeps_its_earlier_values(home, monkeypatch):
    save_preset(home, "train", "mine", {"steps": 1}, lambda: 0.0)

    def interrupted(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("palaestra.files.atomic.os.replace", interrupted)
    with pytest.raises(ConfigError, match="No space left on device"):
        save_preset(home, "train", "mine", {"steps": 2}, lambda: 0.0)
    assert [preset.values for preset in list_presets(home)] == [{"steps": 1}]
    assert [path.name for path in (home.presets / "train").iterdir()] == ["mine.json"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "place"),
    [
        ("GET", "/presets?kind=../x", None, 422, "kind"),
        ("PUT", "/presets/train/mine", {"values": [1]}, 422, "values"),
        ("PUT", "/presets/train/mine", {}, 422, "values"),
        ("PUT", "/presets/train/mine", {"values": {}, "more": 1}, 422, "more"),
        ("PUT", "/presets/..%2F..%2Fx/mine", {"values": {}}, 422, "kind"),
        ("PUT", f"/presets/train/{'x' * 300}", {"values": {}}, 422, "name"),
        ("DELETE", "/presets/train/nothing", None, 404, "preset"),
    ],
)
def test_bad_requests_are_refused_by_place(served, method, path, body, status, place):
    answer = served.ask(method, path, body)
    assert (answer.status, answer.json["error"]["place"]) == (status, place), answer.body
