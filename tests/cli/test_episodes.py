"""`palaestra episodes`: list, show, export and delete the recordings of plays."""

import io
import json
import sys

import numpy as np
import pytest
from tests.runs.play.test_episode import record

from palaestra.runs.play.episode import EpisodeWriter, new_episode_directory
from palaestra.runs.play.state import StepReport
from palaestra.runs.video import encoder


def jpeg(shade):
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), (shade, shade, shade)).save(buffer, "JPEG")
    return buffer.getvalue()


def write_episode(home, episode_id, steps=3, pictures=True, actions=None, **changes):
    """Rewards 1, 2, 3, …; the observation of step k is [k, 2k]; the person acts in odd steps."""
    given = {"started": 1_000.0, "mode": "hybrid", "policy": "ppo", "seed": 7, "fps": 10.0} | changes
    writer = EpisodeWriter(new_episode_directory(home, episode_id), record(episode_id, **given))
    for k in range(steps + 1):
        report = StepReport(
            episode=1,
            step=k,
            action=None if k == 0 else (actions[k - 1] if actions else k % 2),
            actor=None if k == 0 else ("human" if k % 2 else "agent"),
            reward=float(k),
            episode_return=k * (k + 1) / 2,
            terminated=k == steps,
            outputs={"value": 0.5, "probabilities": [0.25, 0.75]} if k == 2 else {},
        )
        writer.add(report, jpeg(40 * k) if pictures else b"", {"": np.array([k, 2 * k], np.float32)})
    return writer


@pytest.fixture
def episodes(palaestra, home):
    """Two finished episodes; `cart-2` is the newer one."""
    write_episode(home, "cart-1").finish("terminated", 1_012.0)
    write_episode(home, "cart-2", started=2_000.0, env_id="Taxi-v4", play_id="play-9").finish("stopped", 2_001.0)
    return lambda *words: palaestra("episodes", *words)


def test_without_episodes_the_list_says_how_to_make_one(palaestra):
    assert palaestra("episodes", "list").out == "No episodes yet. Play some with: palaestra studio\n"
    assert json.loads(palaestra("episodes", "list", "--json").out) == []


def test_episodes_are_listed_newest_first(episodes):
    titles, newer, older = episodes("list").out.splitlines()
    assert titles.split() == "EPISODE ENV MODE POLICY OUTCOME STEPS RETURN STARTED SIZE NOTE".split()
    assert newer.split()[:7] == ["cart-2", "Taxi-v4", "hybrid", "ppo", "stopped", "3", "6"]
    assert older.split()[:5] == ["cart-1", "CartPole-v1", "hybrid", "ppo", "terminated"]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [([], ["cart-2", "cart-1"]), (["--env", "CartPole-v1"], ["cart-1"]), (["--play", "play-9"], ["cart-2"])],
)
def test_the_list_is_filtered(episodes, filters, expected):
    assert [one["episode_id"] for one in json.loads(episodes("list", *filters, "--json").out)] == expected


def test_a_filter_without_match_says_so(episodes):
    assert episodes("list", "--env", "Acrobot-v1").out == "No matching episode.\n"


def test_more_than_thirty_episodes_are_cut_with_a_hint(palaestra, home):
    for number in range(31):
        write_episode(home, f"e-{number}", steps=1, pictures=False).finish("terminated", 1_001.0)
    result = palaestra("episodes", "list")
    assert len(result.out.splitlines()) == 31
    assert "--all" in result.err
    assert len(palaestra("episodes", "list", "--all").out.splitlines()) == 32


def test_an_episode_is_shown_with_its_last_steps(episodes):
    result = episodes("show", "cart-1", "--steps", "2")
    facts, _, table = result.out.partition("\n\n")
    shown = dict(line.split(maxsplit=1) for line in facts.splitlines())
    assert (shown["seed"], shown["outcome"], shown["return"], shown["elapsed"]) == (
        "7",
        "terminated",
        "6.00",
        "0:00:12",
    )
    assert shown["steps"] == "3 (2 by a person, 1 by the policy)"
    assert [line.split() for line in table.splitlines()] == [
        ["STEP", "ACTOR", "ACTION", "REWARD", "RETURN", "POLICY", "END"],
        ["2", "agent", "0", "2", "3", "value", "0.5"],
        ["3", "human", "1", "3", "6", "terminated"],
    ]
    assert "use --steps 4 for all" in result.err


def test_show_as_json_has_the_facts_and_the_steps(episodes):
    document = json.loads(episodes("show", "cart-1", "--steps", "4", "--json").out)
    assert document["episode"]["episode_return"] == 6.0
    assert [step["reward"] for step in document["steps"]] == [0.0, 1.0, 2.0, 3.0]
    assert document["directory"].endswith("episodes/cart-1")
    assert json.loads(episodes("show", "cart-1", "--steps", "0", "--json").out)["steps"] == []


def test_a_demonstration_is_arrays_that_load_without_pickle(episodes, tmp_path):
    result = episodes("export", "cart-1", "--demonstration", "d.npz")
    assert result.out == "d.npz: 3 steps, 2 by a person\n"
    with np.load(tmp_path / "d.npz", allow_pickle=False) as arrays:
        assert arrays["observations"].tolist() == [[0, 0], [1, 2], [2, 4], [3, 6]]
        assert arrays["actions"].tolist() == [1, 0, 1]
        assert arrays["rewards"].tolist() == [1.0, 2.0, 3.0]
        assert arrays["terminated"].tolist() == [False, False, True]
        assert arrays["truncated"].tolist() == [False, False, False]
        assert arrays["by_human"].tolist() == [True, False, True]


@pytest.mark.parametrize(
    "actions", [[{"steer": 1, "gas": [0.5]}] * 3, [[1, [0.5, 2.0]]] * 3], ids=["dictionaries", "tuples"]
)
def test_actions_of_several_parts_are_exported_as_json(palaestra, home, tmp_path, actions):
    write_episode(home, "car-1", actions=actions).finish("terminated", 1_001.0)
    assert palaestra("episodes", "export", "car", "--demonstration", "d.npz").code == 0
    with np.load(tmp_path / "d.npz", allow_pickle=False) as arrays:
        assert [json.loads(text) for text in arrays["actions"].tolist()] == actions


@pytest.mark.parametrize("name", ["clip.webm", "clip.mp4"])
def test_a_video_has_one_frame_per_picture(episodes, tmp_path, name):
    pytest.importorskip("imageio_ffmpeg")
    from tests.runs.video.test_encoder import decoded

    result = episodes("export", "cart-1", "--video", name, "--json")
    assert json.loads(result.out) == {"episode_id": "cart-1", "video": name}
    pixels = np.frombuffer(decoded(tmp_path / name), np.uint8).reshape(-1, 48, 64, 3)
    assert np.abs(pixels.mean(axis=(1, 2, 3)) - [0, 40, 80, 120]).max() < 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "cart-1"], "nothing to write is given. Add --video or --demonstration."),
        (["export", "cart-1", "--video", "clip.gif"], "is neither .webm nor .mp4"),
        (["export", "cart-1", "--video", "missing/clip.webm"], "its directory does not exist"),
        (["export", "cart-1", "--demonstration", "d.npy"], "is not a .npz file. Name it episode.npz."),
        (["export", "cart-1", "--demonstration", "missing/d.npz"], "its directory does not exist"),
        (["show", "cart"], "episode = 'cart': 2 episodes begin with it. palaestra episodes list shows them."),
        (["show", "taxi"], "episode = 'taxi': no such episode. palaestra episodes list shows them."),
        (["show", "../cart-1"], "episode = '../cart-1': is not the id of an episode."),
        (["show", "*"], "episode = '*': is not the id of an episode."),
        (["show", "cart-1", "--steps", "-1"], "--steps = '-1'"),
        (["export", "cart", "--video", "clip.webm"], "2 episodes begin with it"),
        (["delete", "taxi", "--yes"], "no such episode"),
        (["delete", "cart-1", "taxi", "--yes"], "no such episode"),
        (["delete", "cart-1"], "confirmation is required to delete cart-1. Add --yes to confirm."),
    ],
)
def test_wrong_input_is_one_line_with_exit_code_2_and_changes_nothing(episodes, tmp_path, words, message, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    before = sorted(tmp_path.rglob("*"))
    result = episodes(*words)
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert message in result.err
    assert sorted(tmp_path.rglob("*")) == before


def test_without_ffmpeg_a_video_names_the_extra(episodes, monkeypatch):
    monkeypatch.setattr(encoder.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    monkeypatch.setattr(encoder.shutil, "which", lambda name: None)
    result = episodes("export", "cart-1", "--video", "clip.webm")
    assert result.code == 2
    assert "no ffmpeg is installed. pip install 'palaestra[video]'\n" in result.err


def test_without_pillow_a_video_names_the_extra(episodes, monkeypatch):
    monkeypatch.setattr("palaestra.runs.video.encoder.require_encoder", lambda: "ffmpeg")
    monkeypatch.setitem(sys.modules, "PIL", None)
    result = episodes("export", "cart-1", "--video", "clip.webm")
    assert result.code == 2
    assert "Pillow is not installed. pip install 'palaestra[serve]'\n" in result.err


def test_an_episode_without_pictures_has_no_video(palaestra, home):
    pytest.importorskip("imageio_ffmpeg")
    write_episode(home, "blind-1", pictures=False).finish("terminated", 1_001.0)
    result = palaestra("episodes", "export", "blind-1", "--video", "clip.webm")
    assert result.code == 2
    assert "holds no pictures" in result.err


def test_an_undecodable_picture_is_damage_and_leaves_no_file(palaestra, home, tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    writer = write_episode(home, "cart-1", steps=1)
    writer.add(StepReport(episode=1, step=2, action=0), b"\xff\xd8\xff no picture", {"": np.zeros(2, np.float32)})
    writer.finish("terminated", 1_001.0)
    result = palaestra("episodes", "export", "cart-1", "--video", "clip.webm")
    assert result.code == 2
    assert "the picture of step 2 cannot be decoded" in result.err
    assert "palaestra episodes delete cart-1" in result.err
    assert not list(tmp_path.glob("*clip*"))


def test_an_unfinished_episode_is_no_demonstration(palaestra, home, tmp_path):
    writer = write_episode(home, "cart-1")
    result = palaestra("episodes", "export", "cart-1", "--demonstration", "d.npz")
    assert result.code == 2
    assert "is playing: it was never finished" in result.err
    assert not (tmp_path / "d.npz").exists()
    refused = palaestra("episodes", "delete", "cart-1", "--yes")
    assert refused.code == 2
    assert "is being played. End the play first." in refused.err
    writer.finish("stopped", 1_001.0)


def test_a_changed_byte_is_refused_and_nothing_is_written(episodes, home, tmp_path):
    path = home.episodes / "cart-1" / "observations.bin"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    result = episodes("export", "cart-1", "--demonstration", "d.npz")
    assert result.code == 2
    assert "observations.bin was changed after it was recorded" in result.err
    assert not (tmp_path / "d.npz").exists()


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"schema": 1}', '{"schema": 1, "play_id": "p", "env_id": "e", "kind": "k", "started": "x"}'],
)
def test_a_damaged_episode_is_listed_with_its_problem_and_can_be_deleted(episodes, home, text):
    (home.episodes / "cart-1" / "episode.json").write_text(text)
    listed = episodes("list")
    assert listed.code == 0
    assert "! episode.json" in listed.out
    shown = episodes("show", "cart-1")
    assert shown.code == 2
    assert "Delete it: palaestra episodes delete cart-1." in shown.err
    assert episodes("delete", "cart-1", "--yes").out == "cart-1 deleted\n"
    assert sorted(path.name for path in home.episodes.iterdir()) == ["cart-2"]


def test_a_directory_without_a_record_can_be_deleted(episodes, home):
    (home.episodes / "empty-1").mkdir()
    assert "! episode.json cannot be read" in episodes("list").out
    assert episodes("delete", "empty", "--yes").code == 0
    assert not (home.episodes / "empty-1").exists()


def test_several_episodes_are_deleted_once_each(episodes, home):
    result = episodes("delete", "cart-1", "cart-2", "cart-1", "--yes", "--json")
    assert [one["episode_id"] for one in json.loads(result.out)] == ["cart-1", "cart-2"]
    assert list(home.episodes.iterdir()) == []


@pytest.mark.parametrize(("answer", "code", "left"), [("y\n", 0, ["cart-2"]), ("n\n", 1, ["cart-1", "cart-2"])])
def test_deleting_asks_on_a_terminal(episodes, home, monkeypatch, answer, code, left):
    terminal = io.StringIO(answer)
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert episodes("delete", "cart-1").code == code
    assert sorted(path.name for path in home.episodes.iterdir()) == left


def test_control_sequences_of_a_policy_do_not_reach_the_terminal(palaestra, home):
    write_episode(home, "cart-1", policy="\x1b]0;title\x07ppo").finish("terminated", 1_001.0)
    for words in (["list"], ["show", "cart-1"]):
        assert "\x1b" not in palaestra("episodes", *words).out
