"""`palaestra trajectories`: list, view, report and export."""

import json

import pytest
from tests.experience.episodes import SCREEN, SHA, episode, turn

from palaestra.experience.trajectory import Outcome
from palaestra.experience.trajectory_archive import TrajectoryArchive


def fill(directory, outcomes, first=0, task="suite/a"):
    archive = TrajectoryArchive(directory)
    for seed, outcome in enumerate(outcomes, start=first):
        archive.append(
            episode(
                turn(versions=[seed, seed], reward=float(outcome is Outcome.SUCCESS)), episode_id=f"e{seed}",
                outcome=outcome, task={"task": task, "seed": seed, "params": {}}, last_picture=SHA,
            )
        )  # fmt: skip


S, F, E = Outcome.SUCCESS, Outcome.FAILURE, Outcome.ENVIRONMENT_FAILED


@pytest.fixture
def run(tmp_path):
    """A run of two attempts, found by its id."""
    path = tmp_path / "var" / "training" / "runs" / "ui-1"
    fill(path / "attempt_1" / "trajectories", [S, F])
    fill(path / "attempt_2" / "trajectories", [S, E], first=2, task="suite/b")
    (path / "resolved.json").write_text("{}")
    return path


def test_a_run_lists_the_episodes_of_all_its_attempts(palaestra, run):
    by_id, by_path = palaestra("trajectories", "list", "ui-1"), palaestra("trajectories", "list", run)
    assert by_id.code == 0
    assert by_id.out == by_path.out
    assert [line.split()[-1] for line in by_id.out.splitlines()] == ["e0", "e1", "e2", "e3"]
    assert by_id.out.splitlines()[0].split() == ["success", "1", "1", "steps", "v0", "suite/a", "seed", "0", "e0"]
    one = palaestra("trajectories", "list", run / "attempt_2", "--json")
    assert [entry["episode_id"] for entry in json.loads(one.out)] == ["e2", "e3"]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (["--task", "B"], ["e2", "e3"]), (["--outcome", "success"], ["e0", "e2"]), (["--version", "1"], ["e1"]),
        (["--limit", "3"], ["e1", "e2", "e3"]), (["--task", "nowhere"], []),
    ],
)  # fmt: skip
def test_the_list_is_filtered(palaestra, run, filters, expected):
    result = palaestra("trajectories", "list", run, *filters, "--json")
    assert [entry["episode_id"] for entry in json.loads(result.out)] == expected


def test_a_page_is_written_where_it_was_asked_for(palaestra, run, tmp_path):
    result = palaestra("trajectories", "view", run, "--output", "out/page.html", "--outcome", "success", "--json")
    assert result.code == 0, result.err
    facts = json.loads(result.out)
    assert (facts["trajectories"], facts["pictures"], facts["picture_directory"]) == (2, 1, None)
    assert (tmp_path / "out" / "page.html").stat().st_size == facts["bytes"]
    plain = palaestra("trajectories", "view", run, "--max-megabytes", "0")
    assert plain.out.startswith("4 episodes, ")
    assert f"Page: {(tmp_path / 'trajectories.html').as_uri()}\n" in plain.out
    assert (tmp_path / "trajectories_pictures" / f"{SHA}.png").read_bytes() == SCREEN


def test_a_tokenizer_gives_the_tokens_their_texts(palaestra, run, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"click": 5, "[end]": 6, "You": 1}, unk_token="[end]"))
    made.save(str(tmp_path / "tokenizer.json"))
    assert palaestra("trajectories", "view", run, "--tokenizer", tmp_path).code == 0
    page = (tmp_path / "trajectories.html").read_text()
    assert '"words":["You","2","3","click","[end]"]' in page  # a number where the tokenizer knows none
    wrong = palaestra("trajectories", "view", run, "--tokenizer", run / "resolved.json")
    assert wrong.code == 2
    assert "is not a tokenizer" in wrong.err


def test_recorded_episodes_are_scored_and_compared(palaestra, run, tmp_path):
    fill(tmp_path / "other", [F, F, F, S])
    alone = json.loads(palaestra("trajectories", "report", run, "--json").out)
    assert (alone["episodes"], alone["successes"], alone["environment_failed"]) == (3, 2, 1)
    assert list(alone["per_task"]) == ["suite/a", "suite/b"]
    result = palaestra("trajectories", "report", run, "--against", tmp_path / "other", "--output", "r.html", "--json")
    both = json.loads(result.out)
    # Seeds 0 and 1 of suite/a meet; seed 2 of suite/b, and 2 and 3 of the other's suite/a, have no partner.
    assert {key: both["comparison"][key] for key in ("pairs", "only_a", "neither", "unpaired_a", "unpaired_b")} == {
        "pairs": 2, "only_a": 1, "neither": 1, "unpaired_a": 1, "unpaired_b": 2,
    }  # fmt: skip
    assert "suite/a" in (tmp_path / "r.html").read_text()
    words = palaestra("trajectories", "report", run, "--against", tmp_path / "other").out
    assert "success rate 66.7 %" in words
    assert "difference +50.0 points" in words


def test_an_export_is_lines_of_json_and_pictures(palaestra, run, tmp_path):
    result = palaestra("trajectories", "export", run, "--output", "out", "--json")
    assert json.loads(result.out) == {"path": "out", "trajectories": 4}
    lines = [json.loads(line) for line in (tmp_path / "out" / "trajectories.jsonl").read_text().splitlines()]
    assert [line["episode_id"] for line in lines] == ["e0", "e1", "e2", "e3"]
    (shown,) = lines[0]["turns"][0]["pictures"]
    assert (tmp_path / "out" / shown).read_bytes() == SCREEN
    assert lines[0]["turns"][0]["token_ids"] == [5, 6]
    assert lines[0]["turns"][0]["versions"] == [0, 0]
    assert lines[0]["last_picture"] == shown
    again = palaestra("trajectories", "export", run, "--output", "out")
    assert again.code == 2
    assert "not empty" in again.err


def test_a_damaged_file_is_named_and_the_rest_is_shown(palaestra, run):
    torn = next((run / "attempt_1" / "trajectories").glob("00000001_*"))
    torn.write_bytes(torn.read_bytes()[:-1])
    result = palaestra("trajectories", "view", run, "--json")
    assert json.loads(result.out)["trajectories"] == 3
    assert torn.name in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "no-such-run"], "no such run"),
        (["list", "empty"], "no trajectories here"),
        (["view", "RUN", "--outcome", "sucess"], "Did you mean 'success'?"),
        (["view", "RUN", "--limit", "-1"], "must not be negative"),
        (["view", "RUN", "--max-megabytes", "-1"], "must not be negative"),
        (["view", "RUN", "--task", "zzz"], "none of its 4 trajectories matches"),
        (["view", "RUN", "--output", "empty"], "is a directory"),
        (["view", "RUN", "--output", "file/page.html"], "cannot be written"),
        (["view", "RUN", "--tokenizer", "nowhere"], "no such file"),
        (["report", "RUN", "--against", "empty"], "no trajectories here"),
        (["export", "RUN", "--output", "file"], "not empty"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(palaestra, run, tmp_path, arguments, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    before = sorted(tmp_path.rglob("*"))
    result = palaestra("trajectories", *[run if word == "RUN" else word for word in arguments])
    assert result.code == 2
    assert result.out == ""
    assert len(result.err.splitlines()) == 1
    assert result.err.startswith("error: ")
    assert message in result.err
    assert sorted(tmp_path.rglob("*")) == before  # nothing half-written


def test_episodes_that_a_resume_played_again_count_once_as_they_were_played_last(palaestra, run):
    # A crash after e1: attempt 2 goes on from a checkpoint before it, and plays e1 anew, on a second session.
    fill(run / "attempt_2" / "trajectories", [E, S], first=1)
    second = TrajectoryArchive(run / "attempt_2" / "trajectories")
    second.append(episode(turn(reward=1.0), episode_id="e1", outcome=S, attempt=1, task={"task": "suite/a", "seed": 1}))
    result = palaestra("trajectories", "report", run, "--json")
    facts = json.loads(result.out)
    assert (facts["episodes"], facts["successes"], facts["environment_failed"]) == (4, 4, 2)
    assert "1 episode was played again after a resume" in result.err
    assert json.loads(palaestra("trajectories", "list", run, "--outcome", "failure", "--json").out) == []
    first = json.loads(palaestra("trajectories", "report", run / "attempt_1", "--json").out)
    assert (first["episodes"], first["successes"]) == (2, 1)
