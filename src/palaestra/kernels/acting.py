"""Kernels that act on one row of preallocated arrays, called once per step of a vector environment.

A call of a compiled function spends a tenth of a microsecond on every array argument, together more than a small
network takes. These kernels receive one array of addresses instead, and the number of the row. The table must describe
arrays that stay alive and contiguous; `policy.compiled.RowActor` builds it. The arithmetic has the same bits as that of
`kernels.network`. `act_gaussian` has no such form: its sum over action dimensions is vectorised, and the compiler
would group it differently.
"""

from __future__ import annotations

import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from palaestra.kernels.compile import compile_kernel
from palaestra.kernels.network import act_categorical, normalize_rows

(
    BATCH, INPUTS, OUTPUTS, LAYERS, ACTIVATION,
    OBSERVATION, NOISE, ACTION, LOG_PROB, VALUE,
    ACTOR, ACTOR_SIZE, CRITIC, CRITIC_SIZE, ACTOR_SIZES, CRITIC_SIZES,
    HIDDEN, HIDDEN_SIZE, OUT, VALUES, TRANSPOSED, TRANSPOSED_SIZE,
    MEAN, SCALE, CLIP, NORMALIZED, CLIPPED, LOW, HIGH, NUM_ENTRIES,
) = range(30)  # fmt: skip
"""Places in the table. Addresses of `[T, N, ...]` arrays are those of row 0; 0 means that an array is not used."""


@intrinsic
def _pointer(typing_context, address):
    """An integer as a pointer."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@compile_kernel
def _vector(address, size):
    return carray(_pointer(address), (size,), np.float32)


@compile_kernel
def _rows(address, row, height, width):
    """Row `row` of an array `[T, height, width]` of float32."""
    return carray(_pointer(address + row * height * width * 4), (height, width), np.float32)


@compile_kernel
def normalize_row(table, row):
    """Write the normalised observations of row `row`, if the policy normalises."""
    if table[MEAN] != 0:
        batch, inputs = table[BATCH], table[INPUTS]
        mean, scale = _vector(table[MEAN], inputs), _vector(table[SCALE], inputs)
        target = _rows(table[NORMALIZED], 0, batch, inputs)
        normalize_rows(_rows(table[OBSERVATION], row, batch, inputs), mean, scale, _vector(table[CLIP], 1)[0], target)


@compile_kernel
def act_categorical_row(table, row):
    """`act_categorical` on row `row`."""
    batch, inputs, layers = table[BATCH], table[INPUTS], table[LAYERS]
    observation = _rows(table[OBSERVATION], row, batch, inputs)
    if table[MEAN] != 0:
        normalize_row(table, row)
        observation = _rows(table[NORMALIZED], 0, batch, inputs)
    scratch = (
        _vector(table[HIDDEN], table[HIDDEN_SIZE]),
        _rows(table[OUT], 0, batch, table[OUTPUTS]),
        _rows(table[VALUES], 0, batch, 1),
        _vector(table[TRANSPOSED], table[TRANSPOSED_SIZE]),
    )
    act_categorical(
        observation,
        _rows(table[NOISE], row, batch, 1),
        _vector(table[ACTOR], table[ACTOR_SIZE]),
        _vector(table[CRITIC], table[CRITIC_SIZE]),
        carray(_pointer(table[ACTOR_SIZES]), (layers,), np.int64),
        carray(_pointer(table[CRITIC_SIZES]), (layers,), np.int64),
        table[ACTIVATION],
        scratch,
        carray(_pointer(table[ACTION] + row * batch * 8), (batch,), np.int64),
        _vector(table[LOG_PROB] + row * batch * 4, batch),
        _vector(table[VALUE] + row * batch * 4, batch),
    )


@compile_kernel
def clip_row(table, row):
    """Write the Gaussian actions of row `row`, clipped to the bounds of the space."""
    batch, outputs = table[BATCH], table[OUTPUTS]
    action, clipped = _rows(table[ACTION], row, batch, outputs), _rows(table[CLIPPED], row, batch, outputs)
    low, high = _vector(table[LOW], outputs), _vector(table[HIGH], outputs)
    for r in range(batch):
        for j in range(outputs):
            # As numpy.clip: a NaN stays a NaN.
            y = action[r, j]
            y = low[j] if y < low[j] else y
            clipped[r, j] = high[j] if y > high[j] else y
