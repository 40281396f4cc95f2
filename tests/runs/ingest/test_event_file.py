"""Event files: partial, damaged, replaced."""

import contextlib
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from palaestra.runs.ingest.event_file import EventFileTail, ScalarRecord, crc32c, masked_crc32c, parse_scalars

from .event_files import HEADER, framed, scalar, session_start

RECORDS = [HEADER, *(scalar("losses/td_loss", step, step / 4) for step in range(5))]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.out.tfevents.1.host.2.0"


def payloads(tail, limit=100):
    return [found.payload for found in tail.read(limit)]


def test_the_checksum_is_the_published_one():
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(b"") == 0


def test_what_tensorboards_own_writer_wrote_is_read(tmp_path):
    writer = EventFileWriter(str(tmp_path))
    for step in range(200):
        value = Summary.Value(tag="charts/SPS", simple_value=step)
        writer.add_event(Event(wall_time=step + 0.5, step=step, summary=Summary(value=[value])))
    writer.close()
    (path,) = tmp_path.iterdir()

    records = [parse_scalars(payload) for payload in payloads(EventFileTail(path), 1000)]
    assert records[1:] == [ScalarRecord(step + 0.5, step, (("charts/SPS", float(step)),)) for step in range(200)]
    assert records[0].values == ()


def test_cut_at_any_byte_and_completed_later_every_record_comes_once(path):
    whole = framed(*RECORDS)
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        tail = EventFileTail(path)
        found = payloads(tail)
        path.write_bytes(whole)
        assert found + payloads(tail) == RECORDS
        assert tail.corruptions == 0


def test_a_tail_that_is_given_its_position_again_goes_on_there(path):
    path.write_bytes(framed(*RECORDS))
    first = EventFileTail(path)
    found = payloads(first, 2)
    assert found + payloads(EventFileTail(path, first.offset, first.inode)) == RECORDS


@pytest.mark.parametrize("flip", [0x01, 0xFF])
def test_a_damaged_byte_costs_the_record_it_is_in_and_no_other(path, flip):
    whole = framed(*RECORDS)
    ends = [len(framed(*RECORDS[: count + 1])) for count in range(len(RECORDS))]
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
        hit = next(number for number, end in enumerate(ends) if at < end)
        tail = EventFileTail(path)
        assert payloads(tail) == RECORDS[:hit] + RECORDS[hit + 1 :]
        assert tail.corruptions == 1


def test_a_hole_of_zeros_and_a_stretch_of_noise_are_stepped_over(path):
    noise = bytes((i * 37 + 11) % 256 for i in range(5000))
    path.write_bytes(framed(*RECORDS[:2]) + bytes(3000) + framed(*RECORDS[2:4]) + noise + framed(*RECORDS[4:]))
    tail = EventFileTail(path)

    assert payloads(tail) == RECORDS
    assert tail.corruptions == 2


def test_a_writer_that_died_in_the_middle_of_a_record_hides_nothing_of_the_next_ones(path):
    path.write_bytes(framed(*RECORDS[:2]) + framed(RECORDS[2])[:20])
    tail = EventFileTail(path)
    assert payloads(tail) == RECORDS[:2]
    with path.open("ab") as file:
        file.write(framed(*RECORDS[3:]))

    assert payloads(tail) == RECORDS[3:]
    assert tail.corruptions == 1


def test_damage_at_the_end_is_searched_further_when_the_file_grows(path):
    path.write_bytes(framed(*RECORDS[:2]) + b"\xff" * 40)
    tail = EventFileTail(path)
    assert payloads(tail) == RECORDS[:2]
    assert payloads(tail) == []
    with path.open("ab") as file:
        file.write(framed(*RECORDS[2:]))

    assert payloads(tail) == RECORDS[2:]
    assert tail.corruptions == 1


def test_pictures_of_megabytes_are_skipped_unread(path):
    picture = bytes(3_000_000)
    length = struct.pack("<Q", len(picture))
    head = length + struct.pack("<I", masked_crc32c(length))
    path.write_bytes(framed(RECORDS[0]) + head + picture[:100])
    tail = EventFileTail(path)
    assert payloads(tail) == RECORDS[:1]
    path.write_bytes(framed(RECORDS[0]) + head + picture + bytes(4) + framed(*RECORDS[1:]))

    assert payloads(tail) == RECORDS[1:]
    assert tail.corruptions == 0


def test_more_than_a_block_is_read_whole(path):
    many = [scalar("a", step, 0.0) for step in range(30_000)]
    path.write_bytes(framed(*many))
    assert path.stat().st_size > 1 << 20
    assert payloads(EventFileTail(path), 100_000) == many


def test_a_replaced_file_is_read_from_its_beginning(path, tmp_path):
    path.write_bytes(framed(*RECORDS))
    tail = EventFileTail(path)
    assert len(payloads(tail)) == 6
    other = tmp_path / "other"
    other.write_bytes(framed(*RECORDS, *RECORDS))
    other.rename(path)

    assert payloads(tail) == RECORDS * 2


def test_scalars_are_read_in_the_old_form_and_in_the_new():
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="scalars"))
    values = [
        Summary.Value(tag="old", simple_value=-2.5),
        Summary.Value(tag="packed", tensor=TensorProto(dtype=1, float_val=[0.5]), metadata=metadata),
        Summary.Value(tag="bytes", tensor=TensorProto(dtype=1, tensor_content=struct.pack("<f", 0.25))),
        Summary.Value(tag="double", tensor=TensorProto(dtype=2, double_val=[0.1])),
        Summary.Value(tag="vector", tensor=TensorProto(dtype=1, float_val=[1.0, 2.0])),
        Summary.Value(tag="text", tensor=TensorProto(dtype=7, string_val=[b"hello"])),
        Summary.Value(tag="picture", image=Summary.Image(height=1, width=1)),
    ]
    record = parse_scalars(Event(wall_time=3.25, step=-7, summary=Summary(value=values)).SerializeToString())

    assert record == ScalarRecord(3.25, -7, (("old", -2.5), ("packed", 0.5), ("bytes", 0.25), ("double", 0.1)))
    assert parse_scalars(session_start(40)) == ScalarRecord(5.0, 40, (), session_start=True)


@given(
    wall_time=st.floats(allow_nan=False),
    step=st.integers(-(2**63), 2**63 - 1),
    values=st.lists(st.tuples(st.text(min_size=1, max_size=200), st.floats(width=32, allow_nan=False)), max_size=3),
)
def test_a_record_is_read_as_protobuf_reads_it(wall_time, step, values):
    told = [Summary.Value(tag=tag, simple_value=value) for tag, value in values]
    payload = Event(wall_time=wall_time, step=step, summary=Summary(value=told)).SerializeToString()
    assert parse_scalars(payload) == ScalarRecord(wall_time, step, tuple(values))


@given(st.binary(max_size=80))
def test_any_bytes_are_a_record_or_refused(data):
    with contextlib.suppress(ValueError):
        parse_scalars(data)


def test_a_record_cut_short_is_refused_or_says_less():
    whole = scalar("losses/value_loss", 1000, 2.0)
    for size in range(len(whole)):
        with contextlib.suppress(ValueError):
            assert parse_scalars(whole[:size]).values == ()


@settings(max_examples=60, deadline=None)
@given(
    junk=st.lists(st.binary(max_size=60), min_size=len(RECORDS), max_size=len(RECORDS)),
    cuts=st.lists(st.integers(0, 800), max_size=4),
)
def test_whatever_lies_between_records_and_whenever_it_looks_all_of_them_are_found(tmp_path_factory, junk, cuts):
    path = tmp_path_factory.mktemp("events") / "events.out.tfevents.1"
    whole = b"".join(noise + framed(record) for noise, record in zip(junk, RECORDS, strict=True))
    tail, found = EventFileTail(path), []
    for size in [*sorted(cuts), len(whole)]:
        path.write_bytes(whole[:size])
        found += payloads(tail, 3)
    found += payloads(tail)
    assert found == RECORDS
    assert tail.offset == len(whole)
