"""Lines of output by their byte offsets."""

from hypothesis import given, settings
from hypothesis import strategies as st

from palaestra.runs.ingest.stdout import MAX_LINE_BYTES, Line, LineTail, OutputScanner


def test_lines_come_with_the_offsets_they_begin_at_and_an_unfinished_one_waits(tmp_path):
    path = tmp_path / "stdout.log"
    tail = LineTail(path)
    assert tail.read(10) == []
    path.write_bytes(b"one\ntwo\r\nthr")

    assert tail.read(1) == [Line("one", 0)]
    assert tail.read(10) == [Line("two", 4)]
    assert tail.read(10) == []
    path.write_bytes(b"one\ntwo\r\nthree\nfour")
    assert tail.read(10) == [Line("three", 9)]
    assert tail.read(10, final=True) == [Line("four", 15)]
    assert tail.read(10, final=True) == []
    assert tail.offset == 19


def test_bytes_that_are_no_text_are_replaced(tmp_path):
    path = tmp_path / "stdout.log"
    path.write_bytes(b"a\xffb\n\x00\n\xe2\x82\xac\n")
    assert [line.text for line in LineTail(path).read(10)] == ["a�b", "\x00", "€"]


def _all(tail, limit=10):
    found = []
    while lines := tail.read(limit):
        found += lines
    return found


def test_a_line_of_megabytes_is_whole(tmp_path):
    path = tmp_path / "stdout.log"
    path.write_bytes(b"first\n" + b"x" * (MAX_LINE_BYTES - 1) + b"\nlast\n")
    lines = _all(LineTail(path))

    assert [(len(line.text), line.offset, line.cut) for line in lines] == [
        (5, 0, False),
        (MAX_LINE_BYTES - 1, 6, False),
        (4, MAX_LINE_BYTES + 6, False),
    ]


def test_a_line_that_hardly_ends_comes_in_pieces_that_say_so_and_the_next_one_is_found(tmp_path):
    path = tmp_path / "stdout.log"
    path.write_bytes(b"x" * (2 * MAX_LINE_BYTES + 7) + b"\nlast\n")
    lines = _all(LineTail(path))

    assert [(len(line.text), line.cut) for line in lines] == [
        (MAX_LINE_BYTES, True),
        (MAX_LINE_BYTES, True),
        (7, False),
        (4, False),
    ]


def test_a_file_that_shrank_or_was_replaced_begins_anew(tmp_path):
    path = tmp_path / "stdout.log"
    path.write_bytes(b"one\ntwo\n")
    tail = LineTail(path)
    assert len(tail.read(10)) == 2
    path.write_bytes(b"new\n")
    assert tail.read(10) == [Line("new", 0)]
    other = tmp_path / "other"
    other.write_bytes(b"a longer line than before\n")
    other.rename(path)
    assert tail.read(10) == [Line("a longer line than before", 0)]


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=5), limit=st.integers(1, 4))
def test_whenever_it_looks_it_gives_every_line_once(tmp_path_factory, data, cuts, limit):
    path = tmp_path_factory.mktemp("tail") / "stdout.log"
    tail, lines = LineTail(path), []
    for size in [*sorted(min(cut, len(data)) for cut in cuts), len(data)]:
        path.write_bytes(data[:size])
        lines += tail.read(limit)
    while more := tail.read(limit, final=True):
        lines += more

    expected = data.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    assert [line.text for line in lines] == [line.rstrip(b"\r").decode("utf-8", "replace") for line in expected]
    assert all(data[line.offset - 1 : line.offset] in (b"\n", b"") for line in lines)


def test_tracebacks_are_counted_wherever_a_look_ends(tmp_path):
    path = tmp_path / "stdout.log"
    text = b"x\nTraceback (most recent call last):\nboom\n" * 3
    for cut in range(len(text)):
        path.write_bytes(text[:cut])
        watch = OutputScanner(path)
        watch.scan()
        path.write_bytes(text)
        watch.scan()
        assert (watch.tracebacks, watch.size) == (3, len(text))


def test_output_that_was_emptied_is_looked_at_anew(tmp_path):
    path = tmp_path / "stdout.log"
    watch = OutputScanner(path)
    watch.scan()
    assert (watch.size, watch.tracebacks) == (0, 0)
    path.write_bytes(b"Traceback (most recent call last)\n" + b"x" * 100)
    watch.scan()
    path.write_bytes(b"Traceback (most recent call last)\n")
    watch.scan()
    assert (watch.size, watch.tracebacks) == (34, 2)
