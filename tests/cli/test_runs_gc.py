"""`palaestra runs gc` when a change fails."""

import json
import shutil

from tests.runs.serving import service_thread

from palaestra.files.home import Home
from palaestra.runs import TrainerService


def test_what_cannot_be_done_is_named_the_rest_is_done_and_the_exit_code_is_1(palaestra, tmp_path):
    home = Home(tmp_path.resolve() / "var" / "training")
    with service_thread(home, retention={"archive_after_days": 0}):
        ids = []
        for name in ("a", "longer-name"):
            result = palaestra("runs", "start", "--runner", "echo", "--name", name, "--json", "steps=1")
            ids.append(json.loads(result.out)["run_id"])
            TrainerService(home).wait(ids[-1], timeout_s=30)
        shutil.rmtree(home.run(ids[0]).path)

        listed = palaestra("runs", "gc")
        done = palaestra("runs", "gc", "--yes")
        again = palaestra("runs", "gc", "--yes", "--json")

    lines = listed.out.splitlines()[:2]
    assert [line.split()[1] for line in lines] == ids
    assert len({line.index("ended") for line in lines}) == 1
    assert (listed.code, done.code, again.code) == (0, 1, 1)
    assert done.out.splitlines()[-1].startswith("Applied 1 of 2, ")
    assert done.err.startswith(f"error: archive {ids[0]}: ")
    assert [(doom["run_id"], "holds no run" in doom["failed"]) for doom in json.loads(again.out)] == [(ids[0], True)]
    assert (home.path / "archive" / f"{ids[1]}.tar.gz").exists()


def test_gc_shows_what_was_done_automatically_and_webhooks_are_listed_and_tested(palaestra, tmp_path):
    home = Home(tmp_path.resolve() / "var" / "training")
    hook = {"url": "http://127.0.0.1:1/room", "kinds": ["failed"], "timeout_s": 5}
    with service_thread(home, retention={"every_h": 24}, webhooks=[hook]):
        shown = palaestra("runs", "gc").out
        listed = palaestra("runs", "webhooks").out
        tested = palaestra("runs", "webhooks", "--test")
        document = json.loads(palaestra("runs", "webhooks", "--test", "--json").out)
    assert "(0 actions, 0 failed, 0 B)." in shown
    assert "Applied automatically every 24 h; next: " in shown
    assert listed.splitlines()[1].split() == ["http://127.0.0.1:1/…", "failed", "no", "0", "0", "0"]
    assert (tested.code, tested.out.split()[:2]) == (1, ["FAILED", "http://127.0.0.1:1/…"])
    assert [(row["ok"], row["url"]) for row in document] == [(False, "http://127.0.0.1:1/…")]
