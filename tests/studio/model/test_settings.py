import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.studio.model.settings import Settings, settings_file


def test_settings_survive_a_restart(tmp_path):
    path = tmp_path / "deep" / "studio.json"
    settings = Settings(path)
    assert (settings.problem, settings.get("theme", "system")) == ("", "system")
    settings.set("theme", "dark")
    settings.set("recent", ["a"])
    settings.save()

    again = Settings(path)

    assert (again.get("theme", ""), again.get("recent", []), again.problem) == ("dark", ["a"], "")


def test_nothing_is_written_without_a_change_or_without_a_path(tmp_path):
    path = tmp_path / "studio.json"
    Settings(path).save()
    assert not path.exists()
    in_memory = Settings(None)
    in_memory.set("a", 1)
    in_memory.save()
    assert in_memory.get("a", 0) == 1
    settings = Settings(path)
    settings.set("a", 1)
    settings.save()
    path.unlink()
    settings.set("a", 1)
    settings.save()

    assert not path.exists()


def test_null_is_a_value_that_is_saved(tmp_path):
    path = tmp_path / "studio.json"
    settings = Settings(path)
    settings.set("run", None)
    settings.save()

    assert json.loads(path.read_text()) == {"run": None, "schema": 1}


@pytest.mark.parametrize(("stored", "default"), [("x", 1), (1, True), (True, 1), (1, 1.0), ([], {}), (None, "x")])
def test_a_value_of_another_type_reads_as_the_default(stored, default):
    settings = Settings(None)
    settings.set("a", stored)

    assert settings.get("a", default) is default
    assert settings.get("a", None) == stored


def test_a_list_that_was_changed_in_place_is_saved(tmp_path):
    path = tmp_path / "studio.json"
    settings = Settings(path)
    settings.set("recent", ["a"])
    settings.save()
    recent = settings.get("recent", [])
    recent.append("b")
    assert settings.get("recent", []) == ["a"]

    settings.set("recent", recent)
    settings.save()

    assert Settings(path).get("recent", []) == ["a", "b"]


@given(data=st.binary(max_size=60) | st.sampled_from([b"[]", b"{}", b"null", b'{"schema": 2}', b'{"schema": 1,']))
def test_any_file_can_be_replaced_and_what_could_not_be_read_is_kept_beside_it(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("settings") / "studio.json"
    path.write_bytes(data)

    settings = Settings(path)
    settings.set("theme", "dark")
    settings.save()

    assert str(path.with_name("studio.unreadable.json")) in settings.problem
    assert path.with_name("studio.unreadable.json").read_bytes() == data
    assert Settings(path).get("theme", "") == "dark"


def test_brackets_without_an_end_are_a_corrupt_file_like_any_other(tmp_path):
    path = tmp_path / "studio.json"
    path.write_text("[" * 200_000)

    assert "moved" in Settings(path).problem


def test_a_name_of_the_file_itself_cannot_make_it_unreadable(tmp_path):
    path = tmp_path / "studio.json"
    settings = Settings(path)
    settings.set("schema", 99)
    settings.save()

    assert Settings(path).problem == ""


def test_a_disk_that_cannot_be_written_is_reported_and_tried_again(tmp_path):
    place = tmp_path / "a-file"
    place.write_text("")
    settings = Settings(place / "studio.json")
    settings.set("a", 1)
    settings.save()
    assert settings.problem.startswith(f"{place / 'studio.json'} cannot be written (")
    place.unlink()

    settings.save()

    assert Settings(place / "studio.json").get("a", 0) == 1


def test_a_file_that_can_be_neither_read_nor_moved_is_reported(tmp_path):
    path = tmp_path / "studio.json"
    path.write_text("broken")
    (tmp_path / "studio.unreadable.json").mkdir()

    assert Settings(path).problem == f"{path} cannot be read (Is a directory)."


@pytest.mark.skipif(os.geteuid() == 0, reason="root may enter any directory")
def test_a_directory_that_is_closed_to_the_user_is_reported(tmp_path):
    path = tmp_path / "closed" / "studio.json"
    path.parent.mkdir(mode=0)
    try:
        assert Settings(path).problem == f"{path} cannot be read (Permission denied)."
    finally:
        path.parent.chmod(0o700)


def test_the_file_is_where_the_desktop_keeps_configurations(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert settings_file() == tmp_path / "palaestra" / "studio.json"
    monkeypatch.setenv("XDG_CONFIG_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))

    assert settings_file() == tmp_path / ".config" / "palaestra" / "studio.json"
