import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.telemetry.event import (
    SCHEMA,
    Belief,
    CheckpointSaved,
    EpisodeSummary,
    Frame,
    LogLine,
    PhaseChanged,
    TrainingStep,
    UnknownEvent,
    decode,
    encode,
)

whole = st.integers(min_value=0, max_value=2**63)
number = st.floats()
text = st.text(st.characters())
json_tree = st.recursive(
    st.none() | st.booleans() | whole | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
events = st.one_of(
    st.builds(TrainingStep, whole, whole, st.dictionaries(text, number, max_size=5)),
    st.builds(EpisodeSummary, whole, whole, whole, number, whole),
    st.builds(CheckpointSaved, whole, whole, text, text, st.booleans(), st.none() | number),
    st.builds(PhaseChanged, text, text),
    st.builds(LogLine, text, text),
    st.builds(Belief, text, st.dictionaries(text, json_tree, max_size=3)),
    st.builds(Frame, whole, text),
)


@given(events, st.integers(min_value=1, max_value=2**53), st.floats(min_value=0, max_value=1e12))
def test_every_event_comes_back_from_its_line_as_it_was(event, seq, time):
    record = decode(encode(event, seq, time))

    # repr, because NaN is not equal to itself.
    assert repr(record.event) == repr(event)
    assert (record.seq, record.time) == (seq, time)


@given(events)
def test_a_line_is_one_line_of_strict_ascii_json_that_says_what_it_is(event):
    line = encode(event, 7, 1.5)

    data = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert "\n" not in line
    assert line.isascii()
    assert (data["schema"], data["kind"], data["seq"], data["time"]) == (SCHEMA, type(event).__name__, 7, 1.5)


def test_an_episode_is_written_like_this():
    line = encode(EpisodeSummary(env_step=200, episode=3, env_index=1, episode_return=-1.5, length=20), 4, 10.25)

    assert line == (
        '{"schema":1,"kind":"EpisodeSummary","seq":4,"time":10.25,'
        '"env_step":200,"episode":3,"env_index":1,"episode_return":-1.5,"length":20}'
    )


def test_numbers_that_json_cannot_say_travel_as_their_names():
    step = TrainingStep(1, 1, {"a": math.nan, "b": math.inf, "c": -math.inf})

    line = encode(step, 1, 0.0)

    assert json.loads(line)["metrics"] == {"a": "NaN", "b": "Infinity", "c": "-Infinity"}
    back = decode(line).event.metrics
    assert math.isnan(back["a"])
    assert (back["b"], back["c"]) == (math.inf, -math.inf)


def test_bare_nan_and_infinity_as_python_writes_them_are_read():
    line = (
        '{"schema":1,"kind":"TrainingStep","seq":1,"time":0,"update":1,"env_step":8,"metrics":{"a":NaN,"b":-Infinity}}'
    )

    metrics = decode(line).event.metrics

    assert math.isnan(metrics["a"])
    assert metrics["b"] == -math.inf
    assert '"a":"NaN","b":"-Infinity"' in encode(decode(line).event, 1, 0.0)


def test_an_unknown_kind_with_a_bare_infinity_can_be_written_again():
    record = decode('{"schema":1,"kind":"Weather","seq":3,"time":5,"rain":[Infinity,1e999]}')

    assert json.loads(encode(record.event, 3, 5.0))["rain"] == ["Infinity", "Infinity"]


def test_a_whole_number_may_be_written_as_a_float():
    line = '{"schema":1,"kind":"Frame","seq":1,"time":0,"env_step":2048.0,"path":"a.png"}'

    assert decode(line).event == Frame(2048, "a.png")
    with pytest.raises(ValueError, match=r"8\.5 is not a whole number"):
        decode(line.replace("2048.0", "8.5"))


def test_the_metric_that_is_no_number_is_named():
    line = '{"schema":1,"kind":"TrainingStep","seq":1,"time":0,"update":1,"env_step":8,"metrics":{"a":1,"b":"0.5"}}'

    with pytest.raises(ValueError, match=r"metrics\.b: '0\.5' is not a number"):
        decode(line)


def test_numpy_scalars_are_written_as_plain_numbers():
    np = pytest.importorskip("numpy")
    episode = EpisodeSummary(np.int64(8), np.int64(1), np.int32(0), np.float64(2.5), np.int64(8))
    step = TrainingStep(np.int64(1), np.int64(8), {"loss": np.float32(0.5)})

    assert decode(encode(episode, 1, 0.0)).event == EpisodeSummary(8, 1, 0, 2.5, 8)
    assert decode(encode(step, 2, 0.0)).event == TrainingStep(1, 8, {"loss": 0.5})


def test_a_kind_from_a_later_version_is_kept_as_unknown():
    line = '{"schema":1,"kind":"Weather","seq":3,"time":5,"rain":true}'

    record = decode(line)

    assert record == (3, 5.0, UnknownEvent(1, "Weather", {"rain": True}))
    assert decode(encode(record.event, 3, 5.0)) == record


def test_a_known_kind_of_a_newer_schema_is_not_guessed_at():
    line = encode(Frame(1, "a.png"), 1, 0.0).replace('"schema":1', '"schema":2')

    assert decode(line).event == UnknownEvent(2, "Frame", {"env_step": 1, "path": "a.png"})


def test_a_field_added_later_does_not_hide_the_event():
    line = encode(Frame(1, "a.png"), 1, 0.0).replace('"path"', '"codec":"av1","path"')

    assert decode(line).event == Frame(1, "a.png")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "null",
        "[1]",
        '{"schema":1',
        '{"kind":"Frame","seq":1,"time":0}',
        '{"schema":0,"kind":"Frame","seq":1,"time":0,"env_step":1,"path":""}',
        '{"schema":1,"kind":"Frame","seq":0,"time":0,"env_step":1,"path":""}',
        '{"schema":1,"kind":"Frame","seq":1,"time":0,"env_step":1}',
        '{"schema":1,"kind":"Frame","seq":1,"time":0,"env_step":true,"path":""}',
        '{"schema":1,"kind":"Frame","seq":1,"time":0,"env_step":1,"path":7}',
        '{"schema":1,"kind":"Frame","seq":1,"time":NaN,"env_step":1,"path":""}',
        '{"schema":1,"kind":"Frame","seq":1,"time":"soon","env_step":1,"path":""}',
        '{"schema":1,"kind":"Belief","seq":1,"time":0,"agent":"a","beliefs":[]}',
        '{"schema":1,"kind":"TrainingStep","seq":1,"time":0,"update":1,"env_step":1,"metrics":{"a":null}}',
        '{"schema":1,"kind":"TrainingStep","seq":1,"time":1' + "0" * 400 + "}",
        '{"schema":1,"kind":"CheckpointSaved","seq":1,"time":0,"update":1,"env_step":1,"path":"","sha256":"","best":1}',
        "[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_line_that_is_no_record_is_refused(line):
    with pytest.raises(ValueError, match=r".+"):
        decode(line)


def test_what_json_does_not_know_inside_beliefs_becomes_its_text():
    belief = Belief("a", {"at": (1, 2), "when": complex(0, 1), "speed": math.inf, 3: "three"})

    assert decode(encode(belief, 1, 0.0)).event.beliefs == {
        "at": [1, 2],
        "when": "1j",
        "speed": "Infinity",
        "3": "three",
    }


def test_telemetry_imports_neither_torch_nor_any_optional_package():
    heavy = ["torch", "tensordict", "transformers", "numpy", "rich", "tensorboard", "wandb"]
    code = f"import sys, palaestra.telemetry; print([m for m in {heavy!r} if m in sys.modules])"

    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert answer.stdout.strip() == "[]"


def test_the_package_shows_at_most_ten_names_and_declares_them_all():
    from types import ModuleType

    import palaestra.telemetry as package

    visible = {n for n, v in vars(package).items() if not n.startswith("_") and not isinstance(v, ModuleType)}
    assert visible - {"TYPE_CHECKING", "lazy_attributes"} <= set(package.__all__)
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        package.Nothing  # noqa: B018
    assert len(package.__all__) <= 10
