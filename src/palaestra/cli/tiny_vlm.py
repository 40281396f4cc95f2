"""`palaestra tiny-vlm`: train and inspect the small built-in vision-language model."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from palaestra.cli.terminal import JsonOption, print_json


def make(
    output: Annotated[Path, typer.Option(metavar="DIRECTORY", help="New directory for the model.")] = Path("tiny-vlm"),
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed; the same seed gives the same model.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Train a new model on synthetic screens.

    Takes minutes on one core.
    """
    _require_transformers()
    from palaestra.policy.tiny_vlm import Recipe, train_model, write_model
    from palaestra.policy.tiny_vlm.recipe import check_output_path

    check_output_path(output)  # before minutes of training
    start = time.monotonic()

    def log(line: str) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {line}", file=sys.stderr, flush=True)

    recipe = Recipe(seed=seed)
    manifest = write_model(train_model(recipe, log), recipe, output)
    _print_manifest(manifest, output, as_json)


def info(
    path: Annotated[
        Path | None, typer.Argument(metavar="PATH", help="Model directory. Default: the built-in model.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show how a model was trained, after verifying its files."""
    _require_transformers()
    from palaestra.policy.tiny_vlm import SHIPPED, read_manifest

    directory = SHIPPED if path is None else path
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


def _require_transformers() -> None:
    from palaestra.errors import ConfigError

    try:
        import PIL
        import transformers

        del PIL, transformers
    except ImportError as error:
        raise ConfigError("tiny-vlm", error.name, "is not installed", "Install 'palaestra[vlm]'") from None
