"""What docs/vlm.md shows, runs."""

import re
from pathlib import Path

from tests.policy.vlm import toy

PAGE = (Path(__file__).parents[3] / "docs" / "vlm.md").read_text()


def test_the_pages_example_runs(qwen3):
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    code = code.replace("Qwen/Qwen2.5-VL-3B-Instruct", str(qwen3)).replace("(1288, 728)", "(40, 32)")
    scope = {"png_bytes": toy.screenshot(1)}
    exec(code, scope)
    assert scope["policy"].version == 1
    assert scope["policy"].trainable_parameters()[0].grad is not None


def test_the_page_names_every_target_option():
    from typing import get_args

    from palaestra.policy.vlm.config import TargetOption

    assert all(f"| `{option}` |" in PAGE for option in get_args(TargetOption))
