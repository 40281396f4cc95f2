"""Messages of a play survive any cut of the stream, and a control is accepted exactly or refused with a reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.errors import ConfigError
from palaestra.runs.play.protocol import (
    CONTROLS,
    Act,
    LoadPolicy,
    MessageBuffer,
    Pause,
    RemovePolicy,
    Reset,
    SetMode,
    SetRecording,
    SetSpeed,
    SingleStep,
    TakeControl,
    decode_control,
    encode_control,
    pack,
    unpack,
)
from palaestra.runs.play.state import PlayNotice, StepReport, pack_report, read_report

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
controls = st.one_of(
    st.builds(Reset, st.none() | st.integers(0, 2**31 - 1)),
    st.just(SingleStep()),
    st.builds(Pause, st.booleans()),
    st.builds(SetSpeed, st.floats(0.05, 100.0)),
    st.builds(SetMode, st.sampled_from(["human", "hybrid", "agent"])),
    st.builds(Act, json_values, st.integers(0, 2**53 - 1)),
    st.builds(TakeControl, st.sampled_from(["human", "agent"])),
    st.builds(LoadPolicy, st.text(st.characters(codec="ascii", exclude_characters="\0"), min_size=1), st.booleans()),
    st.just(RemovePolicy()),
    st.builds(SetRecording, st.booleans()),
)


@given(
    st.lists(st.tuples(st.dictionaries(st.text(), st.integers(-9, 9), max_size=3), st.binary()), max_size=5), st.data()
)
def test_messages_arrive_whole_and_in_order_however_the_stream_is_cut(messages, data):
    stream = b"".join(pack(header, payload) for header, payload in messages)
    buffer, arrived, position = MessageBuffer(), [], 0
    while position < len(stream):
        length = data.draw(st.integers(1, len(stream) - position))
        arrived += buffer.add(stream[position : position + length])
        position += length
    assert [(message.header, message.payload) for message in arrived] == messages
    assert not buffer.has_part


@given(controls)
def test_a_control_is_read_as_it_was_written(control):
    assert decode_control(encode_control(control)) == control


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_refused_and_never_crash(data):
    with pytest.raises(ConfigError):
        decode_control(data)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"type": "dance"}, "is none of"),
        ({"type": "pause"}, "on is missing"),
        ({"type": "pause", "on": 1}, "must be true or false"),
        ({"type": "pause", "on": True, "now": 1}, "unknown key"),
        ({"type": "speed", "factor": 0}, "must lie between"),
        ({"type": "speed", "factor": True}, "must lie between"),
        ({"type": "mode", "mode": "robot"}, "is none of human, hybrid, agent"),
        ({"type": "reset", "seed": -1}, "must be a whole number"),
        ({"type": "reset", "seed": 1.5}, "must be a whole number"),
        ({"type": "control", "by": "cat"}, "is neither human nor agent"),
        ({"type": "load_policy", "checkpoint": ""}, "is not the id or path"),
        ({"type": ["reset"]}, "is none of"),
        ({"type": "speed", "factor": 10**400}, "must lie between"),
        ({"type": "act", "action": 10**400}, "beyond 64 bits"),
        ({"type": "load_policy"}, r"\[\]: checkpoint is missing"),
    ],
)
def test_a_control_with_a_wrong_value_is_refused_with_the_reason(header, reason):
    with pytest.raises(ConfigError, match=reason):
        decode_control(pack(header))


def test_an_action_that_is_nested_too_deeply_is_refused():
    text = b'{"type":"act","action":' + b"[" * 900 + b"]" * 900 + b"}"
    with pytest.raises(ConfigError, match="nested deeper than 64 levels"):
        decode_control(len(text).to_bytes(4, "little") + bytes(4) + text)


def test_every_control_has_a_name_of_its_own():
    assert len(CONTROLS) == 10


def test_two_messages_are_not_one():
    with pytest.raises(ValueError, match="one whole message"):
        unpack(pack({"type": "a"}) + pack({"type": "b"}))


def test_a_length_beyond_the_limit_ends_the_stream_instead_of_filling_the_memory():
    with pytest.raises(ValueError, match="too long"):
        list(MessageBuffer().add(b"\xff" * 8))


def test_a_report_keeps_numbers_that_json_has_no_literal_for():
    report = StepReport(episode=1, step=2, reward=float("inf"), episode_return=float("-inf"), outputs={"value": 0.5})
    assert read_report(unpack(pack_report(report, b"jpeg"))) == report


def test_a_report_of_a_later_version_is_skipped():
    assert read_report(unpack(pack({"type": "hologram"}))) is None
    assert read_report(unpack(pack({"type": "notice", "level": "info", "text": "a", "colour": "red"}))) == PlayNotice(
        level="info", text="a"
    )
