"""Late imports of a script, found from its source and the values of its arguments."""

import pytest

from palaestra.runs.runners.cleanrl_imports import scan_imports

SCRIPT = """
import numpy as np
from utils.evals import evaluate as play
try:
    import cv2
except ImportError:
    cv2 = None
else:
    import extra

def helper():
    import inner

if __name__ == "__main__":
    args = tyro.cli(Args)
    if args.track:
        import wandb.sdk
    for _ in range(3):
        if args.save_model and args.total > 10:
            from utils.evals import evaluate
            evaluate(1, make_env)
            if not args.upload_model:
                pass
            else:
                from utils.hub import push
    if somebody():
        import perhaps
    env = gym.wrappers.FrameStack(env, 4)
"""
EVALS = """
import torch
def evaluate(path, make_env, capture_video: bool = True):
    import late
def unused():
    import never
if __name__ == "__main__":
    import never_either
"""


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "evals.py").write_text(EVALS)
    (tmp_path / "utils" / "hub.py").write_text("import tenacity\ndef push():\n    from hub import api\n")
    return tmp_path


def _scan(checkout, source=SCRIPT, **values):
    script = checkout / "script.py"
    script.write_text(source)
    return scan_imports(script, checkout, ["utils"], {"track": False, "save_model": False, "total": 100, **values})


ALWAYS = {"numpy", "torch", "late", "extra", "inner", "perhaps"}


def test_branches_that_the_arguments_do_not_reach_import_nothing(checkout):
    found = _scan(checkout)
    assert (found.packages, found.records_video, found.wrappers) == (ALWAYS, False, {"FrameStack"})


def test_branches_that_the_arguments_reach_do(checkout):
    assert _scan(checkout, track=True).packages == ALWAYS | {"wandb"}
    saved = _scan(checkout, save_model=True, upload_model=False)
    assert (saved.packages, saved.records_video) == (ALWAYS, True)
    assert _scan(checkout, save_model=True, upload_model=True).packages == ALWAYS | {"tenacity", "hub"}
    assert not _scan(checkout, save_model=True, total=10).records_video


def test_an_argument_of_unknown_value_reaches_both_branches(checkout):
    assert _scan(checkout, save_model=True).packages == ALWAYS | {"tenacity", "hub"}


@pytest.mark.parametrize(
    ("call", "films"), [("1, 2, False", False), ("1, 2, capture_video=False", False), ("1, 2", True)]
)
def test_a_function_that_films_unless_told_otherwise_films(checkout, call, films):
    source = f"from utils.evals import evaluate\nreturns = evaluate({call})\n"
    assert _scan(checkout, source).records_video is films


def test_a_module_of_the_checkout_that_is_not_there_or_broken_is_left_to_the_script(checkout):
    (checkout / "utils" / "broken.py").write_text("def (")
    assert _scan(checkout, "import utils.none\nfrom utils.broken import x\nimport numpy\n").packages == {"numpy"}
