"""What the built-in reading model does on held-out drawn pages: clicks and typed texts, by the kind of goal.

`python -m benchmarks.ui_acting` draws pages as in pretraining, with another seed, reads them with the tower, and
compares the likeliest reply with the right one. Pages whose reply cannot be made from what was read are counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path

import torch

from benchmarks.machine import facts
from benchmarks.ui_runs import format_share, format_table
from palaestra.policy.screen_reader.detection import detect
from palaestra.policy.screen_reader.examples import Example, ExampleBuilder
from palaestra.policy.screen_reader.pages import Goal
from palaestra.policy.screen_reader.recipe import LabelledPage, draw_pages
from palaestra.policy.screen_reader.symbols import read_in_order
from palaestra.policy.screen_reader.tokenizer import coordinate_ids
from palaestra.policy.vlm import ModelConfig
from palaestra.policy.vlm.loading import load_model

RESULTS = Path(__file__).parent / "results"
PAGES, SEED = 1500, 987_654
KINDS = {
    "click": "the place lies in the target",
    "type, from the instruction": "the text is exact",
    "type, the value of one label": "the text is exact",
    "type, one of several labelled values": "the text is exact",
    "type, from a row of a sheet": "the text is exact",
    "key or scroll": "the action is right",
}


def find_kind(goal: Goal) -> str:
    """The kind of a goal."""
    if goal.target:
        return "click"
    if not goal.text:
        return "key or scroll"
    if goal.text in goal.instruction:
        return "type, from the instruction"
    if " row " in goal.instruction:
        return "type, from a row of a sheet"
    what = goal.instruction.partition(" into the ")[0]
    several = " and " in what or "," in what or what.endswith((" values", " both"))
    return "type, one of several labelled values" if several else "type, the value of one label"


def is_right(model: torch.nn.Module, example: Example, page: LabelledPage, goal: Goal, axes: list[list[int]]) -> bool:
    """Whether the likeliest reply is the right one."""
    rows = torch.from_numpy(example.rows)
    grid = torch.tensor([[1, len(rows), 1]])
    with torch.no_grad():
        logits = model(torch.tensor([example.ids]), pixel_values=rows, image_grid_thw=grid).logits[0]
    replies = logits[example.start - 1 : -1].argmax(-1).tolist()
    wanted = example.ids[example.start :]
    if not goal.target:
        return replies == wanted
    if replies[0] != wanted[0] or replies[1] not in axes[0] or replies[2] not in axes[1]:
        return False
    left, top, width, height = page.drawn.places[goal.target]
    x, y = (axis.index(token) * side / 999 for axis, token, side in zip(axes, replies[1:3], page.size, strict=True))
    return left <= x <= left + width and top <= y <= top + height


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-reader", help="name or directory of a reading model")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load_model(ModelConfig(name=asked.model, use_lora=False))
    builder, rng = ExampleBuilder(loaded.tokenizer, blur_px=3.0), random.Random(SEED)
    axes = [list(ids) for ids in coordinate_ids(loaded.tokenizer)]
    counts = {kind: [0, 0] for kind in KINDS}
    unread = 0
    for page in asyncio.run(draw_pages(PAGES, seed=SEED, dense=False)):
        sequence = read_in_order(detect(loaded.image_processor.tower, page.drawn.pixels))
        for goal in page.goals[:1]:
            example = builder.build(goal, sequence, page.drawn.places, page.size, rng)
            if example is None:
                unread += 1
                continue
            count = counts[find_kind(goal)]
            count[0] += is_right(loaded.model, example, page, goal, axes)
            count[1] += 1
    results = {"machine": facts(), "pages": PAGES, "seed": SEED, "right_and_all": counts, "unread": unread}
    (RESULTS / "ui_acting.json").write_text(json.dumps(results, indent=1) + "\n")
    rows = [["goal", "right if", "pages", "right, %"]]
    rows += [[kind, KINDS[kind], str(count[1]), format_share(count)] for kind, count in counts.items()]
    (RESULTS / "ui_acting.md").write_text(format_table(rows))
    print(format_table(rows), f"{unread} goals whose target or text was not read are left out.")


if __name__ == "__main__":
    main()
