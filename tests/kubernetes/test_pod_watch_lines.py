"""Events of a watch are read by the line, however long a line is and however it is cut up."""

import asyncio
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from palaestra.gateway.pods.api import split_lines


async def _read(chunks):
    async def given_out():
        for chunk in chunks:
            yield chunk

    return [line async for line in split_lines(given_out())]


def _cut(data, places):
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@given(
    st.lists(st.binary(min_size=1).filter(lambda line: b"\n" not in line), max_size=6), st.lists(st.integers(0, 999))
)
def test_lines_come_whole_wherever_the_chunks_are_cut(lines, places):
    data = b"".join(line + b"\n" for line in lines)
    assert asyncio.run(_read(_cut(data, places))) == lines


def test_a_line_of_a_megabyte_is_one_line_and_so_is_what_comes_without_an_end():
    long = b"x" * 2**20
    assert asyncio.run(_read([long[:1000], long[1000:] + b"\n", b"\n", b"rest"])) == [long, b"rest"]
