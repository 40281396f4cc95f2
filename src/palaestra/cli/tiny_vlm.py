"""`palaestra tiny-vlm make` and `palaestra tiny-vlm info`: the small built-in model, and another one like it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["tiny_vlm_app"]

tiny_vlm_app = typer.Typer(help="The built-in vision-language model.", no_args_is_help=True, rich_markup_mode=None)


@tiny_vlm_app.command("make")
def make(
    output: Annotated[Path, typer.Option(help="A directory that does not exist yet.")] = Path("tiny-vlm"),
    seed: Annotated[int, typer.Option(help="Same seed, same model.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document at the end.")] = False,
) -> None:
    """Draw screens and teach a new model on them. Takes minutes on one core."""
    _with_transformers()
    from palaestra.policy.tiny_vlm import Recipe, train_model, write_model
    from palaestra.policy.tiny_vlm.recipe import check_output_path

    check_output_path(output)  # before the minutes, not after
    begun = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - begun:5.0f} s  {line}", file=sys.stderr, flush=True)

    recipe = Recipe(seed=seed)
    manifest = write_model(train_model(recipe, say), recipe, output)
    _show(manifest, output, as_json)


@tiny_vlm_app.command("info")
def info(
    path: Annotated[Path | None, typer.Argument(help="Left out: the model that comes with the package.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say what a tiny model was made of, after checking that its files are what they were."""
    _with_transformers()
    from palaestra.policy.tiny_vlm import SHIPPED, read_manifest

    place = SHIPPED if path is None else path
    _show(read_manifest(place), place, as_json)


def _show(manifest: dict[str, Any], place: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"path": str(place), **manifest}))
        return
    size = sum(file.stat().st_size for file in place.iterdir())
    print(f"{place}: {manifest['parameters']:,} weights, {size / 1e6:.1f} MB")
    print("recipe: " + ", ".join(f"{name} {value}" for name, value in manifest["recipe"].items()))
    for stage, figures in manifest["figures"].items():
        print(f"{stage}: " + ", ".join(f"{name} {value}" for name, value in figures.items()))
    print("made with " + ", ".join(f"{name} {value}" for name, value in manifest["versions"].items()))


def _with_transformers() -> None:
    from palaestra.errors import ConfigError

    try:
        import PIL
        import transformers

        del PIL, transformers
    except ImportError as error:
        raise ConfigError("tiny-vlm", error.name, "is not installed", "Install 'palaestra[vlm]'") from None
