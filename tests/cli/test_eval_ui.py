"""`palaestra eval` of UI agents: the report of a comparison and the picture beside it."""

import json
from pathlib import Path

from PIL import Image
from tests.train.test_session_servers import config as screen_config
from tests.train.test_session_servers import server_process

from palaestra.train.screens import train_screens


def test_a_comparison_of_two_checkpoints_leaves_a_picture_beside_its_report(palaestra, home):
    with server_process("--fake") as url:
        config = screen_config({"session_servers": url})
        run = train_screens(config, root=home.runs, run_id="one").run
        before, after = sorted(run.attempts()[-1].checkpoints.glob("update_*"))
        compared = palaestra("eval", after, "--against", before, "--episodes", 3, "--json")
        alone = palaestra("eval", after, "--episodes", 2, "--json")
    assert compared.code == 0, compared.err
    document = json.loads(compared.out)
    picture, page = Path(document["picture"]), Path(document["page"])
    assert picture == page.with_name("before-after.png")
    assert 'href="before-after.png"' in page.read_text()
    with Image.open(picture) as drawn:
        assert drawn.format == "PNG"
    assert document["comparison"]["pairs"] == 3
    assert "picture" not in json.loads(alone.out)
