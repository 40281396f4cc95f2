"""`palaestra tiny-vlm`: train and inspect the small built-in vision-language models."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from palaestra.cli.terminal import JsonOption, print_json
from palaestra.extras import require_extras


class ModelName(StrEnum):
    """The models that come with the package."""

    TINY = "tiny"
    READER = "tiny-reader"


def make(
    output: Annotated[Path, typer.Option(metavar="DIRECTORY", help="New directory for the model.")] = Path("tiny-vlm"),
    model: Annotated[
        ModelName, typer.Option(help="tiny: clicks widgets. tiny-reader: also reads and types; needs Chromium.")
    ] = ModelName.TINY,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed; the same seed gives the same model.")] = 0,
    tower: Annotated[
        str, typer.Option(metavar="MODEL", help="tiny-reader: use the vision tower of this reading model.")
    ] = "",
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="tiny-reader: training steps of the language model. Default: 6000."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a new model on synthetic screens.

    Takes minutes on one core; tiny-reader one to two hours.
    """
    require_extras("tiny-vlm", "vlm")
    from palaestra.errors import ConfigError
    from palaestra.policy.model_directory import check_output_path

    for option, value in (("--tower", tower or None), ("--steps", steps)):
        if value is not None and model is not ModelName.READER:
            raise ConfigError(option, value, "applies to --model tiny-reader only", "Leave it out, or add that option")
    check_output_path(output)  # before minutes of training
    start = time.monotonic()

    def log(line: str) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {line}", file=sys.stderr, flush=True)

    if model is ModelName.READER:
        require_extras("tiny-vlm", "ui")
        from palaestra.policy.screen_reader.recipe import ReaderRecipe, train_reader, write_reader

        plan = ReaderRecipe(seed=seed, tower=tower, **({} if steps is None else {"act_steps": steps}))
        manifest = write_reader(train_reader(plan, log), plan, output)
    else:
        from palaestra.policy.tiny_vlm import Recipe, train_model, write_model

        recipe = Recipe(seed=seed)
        manifest = write_model(train_model(recipe, log), recipe, output)
    _print_manifest(manifest, output, as_json)


def join(
    language: Annotated[
        Path, typer.Option(metavar="PATH", help="Directory of a causal language model, or a GGUF file of one.")
    ],
    output: Annotated[Path, typer.Option(metavar="DIRECTORY", help="New directory for the model.")] = Path("joined"),
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed.")] = 0,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Training steps.")] = 260,
    tower: Annotated[
        str, typer.Option(metavar="MODEL", help="Reading model whose vision tower is used.")
    ] = "tiny-reader",
    as_json: JsonOption = False,
) -> None:
    """Teach a pretrained language model to read screens.

    The model directory can be named in model.name. Needs Chromium; a model of 135 million weights takes half an hour on
    one core.
    """
    require_extras("tiny-vlm", "vlm", "ui")
    from palaestra.policy.model_directory import check_output_path
    from palaestra.policy.screen_reader.joined.training import JoinRecipe, train_joined_reader, write_joined_reader

    check_output_path(output)
    start = time.monotonic()

    def log(line: str) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {line}", file=sys.stderr, flush=True)

    recipe = JoinRecipe(seed=seed, steps=steps, tower=tower)
    manifest = write_joined_reader(train_joined_reader(language, recipe, log), language, recipe, output)
    _print_manifest(manifest, output, as_json)


def info(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="Model directory, or the name of a built-in model.")
    ] = Path("tiny"),
    as_json: JsonOption = False,
) -> None:
    """Show how a model was trained, after verifying its files."""
    require_extras("tiny-vlm", "vlm")
    from palaestra.policy.model_directory import read_manifest
    from palaestra.policy.vlm.loading import BUILT_IN

    directory = BUILT_IN.get(str(path), path)
    _print_manifest(read_manifest(directory), directory, as_json)


def _print_manifest(manifest: dict[str, Any], directory: Path, as_json: bool) -> None:
    if as_json:
        print_json({"path": str(directory), **manifest})
        return
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{directory}: {manifest['parameters']:,} weights, {size / 1e6:.1f} MB")
    print("recipe: " + ", ".join(f"{name} {value}" for name, value in manifest["recipe"].items()))
    for stage, figures in manifest["figures"].items():
        print(f"{stage}: " + ", ".join(f"{name} {value}" for name, value in figures.items()))
    print("made with " + ", ".join(f"{name} {value}" for name, value in manifest["versions"].items()))
