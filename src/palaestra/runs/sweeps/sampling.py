"""Configurations of a grid and of random search. Each depends on the spec and its number only, so that a service that
was killed draws the same ones again.
"""

from __future__ import annotations

import math
import random
from typing import Any

from palaestra.runs.sweeps.spec import SweepSpec, SweptParameter
from palaestra.runs.wire import JsonObject


def sample_parameters(spec: SweepSpec, number: int) -> JsonObject:
    """The values of trial `number`, from 0, of a sweep with the sampler `grid` or `random`."""
    return _grid_point(spec, number) if spec.sampler == "grid" else _random_point(spec, number)


def _grid_point(spec: SweepSpec, number: int) -> JsonObject:
    """The last parameter varies fastest."""
    point: JsonObject = {}
    for key, parameter in reversed(spec.parameters.items()):
        number, index = divmod(number, parameter.num_values or 1)
        point[key] = parameter.value(index)
    return dict(reversed(point.items()))


def _random_point(spec: SweepSpec, number: int) -> JsonObject:
    # A generator of its own for each number: the order of the draws does not matter.
    rng = random.Random(f"{spec.sampler_seed}:{number}")
    return {key: _draw(parameter, rng) for key, parameter in spec.parameters.items()}


def _draw(parameter: SweptParameter, rng: random.Random) -> Any:
    if (count := parameter.num_values) is not None:
        return parameter.value(rng.randrange(count))
    low, high = parameter.low or 0, parameter.high or 0
    if not parameter.log:
        return rng.uniform(low, high)
    # Each integer gets its share of the scale, from half a unit below it to half a unit above it.
    margin = 0.5 if parameter.is_integer else 0.0
    value = math.exp(rng.uniform(math.log(low - margin), math.log(high + margin)))
    return min(high, max(low, round(value) if parameter.is_integer else value))
