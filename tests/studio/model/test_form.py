import copy
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.cli.catalog import schema as print_schema
from palaestra.runs.runners.cleanrl import CleanrlRunner
from palaestra.runs.runners.echo import EchoRunner
from palaestra.runs.runners.sb3 import Sb3Config
from palaestra.runs.spec import RunSpec
from palaestra.studio.model.form import GENERAL, UNSET, Form, FormField, fields_of, flatten

CHECKOUT = Path(__file__).parents[2] / "runs" / "runners" / "checkout"


def _field(kind, **options):
    return FormField(path="x", title="x", group=GENERAL, kind=kind, **options)


def _only_field(part, **schema):
    """The field of a schema with one property."""
    (field,) = fields_of({"properties": {"x": part}, **schema})
    return field


# ---------------------------------------------------------------------- a text and its value


_FINITE = st.floats(allow_nan=False, allow_infinity=False)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | _FINITE | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.parametrize("can_be_empty", [False, True])
@given(value=st.text())
def test_a_text_field_gives_back_any_text_that_was_formatted(can_be_empty, value):
    field = _field("text", can_be_empty=can_be_empty)

    assert field.parse(field.format(value)) == value


@given(value=st.integers(-(10**30), 10**30))
def test_an_integer_field_gives_back_any_integer_exactly(value):
    parsed = _field("integer").parse(_field("integer").format(value))

    assert parsed == value
    assert type(parsed) is int


@given(value=_FINITE)
def test_a_number_field_gives_back_any_finite_number_exactly(value):
    assert _field("number").parse(_field("number").format(value)) == value


@given(value=st.booleans())
def test_a_flag_gives_back_its_value(value):
    assert _field("flag").parse(_field("flag").format(value)) is value


@pytest.mark.parametrize("allows_text", [False, True])
@given(value=_JSON.filter(lambda value: value is not None))
def test_a_json_field_gives_back_any_json_value(allows_text, value):
    field = _field("json", allows_text=allows_text)

    assert json.dumps(field.parse(field.format(value))) == json.dumps(value)


@given(
    choices=st.lists(st.text() | st.integers() | st.booleans() | _FINITE, min_size=1, unique_by=repr),
    can_be_empty=st.booleans(),
)
def test_a_choice_gives_back_each_of_its_values_even_when_two_look_alike(choices, can_be_empty):
    field = _field("choice", choices=(*choices, *([None] if can_be_empty else [])), can_be_empty=can_be_empty)

    for choice in field.choices:
        parsed = field.parse(field.format(choice))
        assert (type(parsed), parsed) == (type(choice), choice)


@pytest.mark.parametrize("kind", ["flag", "integer", "number", "text", "choice", "json"])
def test_null_is_the_word_none_where_it_is_a_value_and_cannot_be_entered_elsewhere(kind):
    empty = _field(kind, can_be_empty=True)

    assert empty.format(None) == "none"
    assert [empty.parse(word) for word in ("none", "None", "null", " NULL ")] == [None] * 4
    assert _field(kind).format(None) == ""


def test_an_empty_text_is_the_default_unless_the_field_is_required():
    assert _field("integer", default=3).parse("  ") is UNSET
    assert _field("integer").format(UNSET) == ""
    with pytest.raises(ValueError, match=r"^is required$"):
        _field("integer", is_required=True).parse("")


def test_the_absence_of_a_default_can_be_shown():
    assert repr(UNSET) == "(none)"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1_000_000", 1_000_000),
        ("1,000,000", 1_000_000),
        ("-12,000", -12_000),
        ("1e6", 1_000_000),
        ("3.0", 3),
        ("9007199254740993", 2**53 + 1),  # a float would round it to an even number
    ],
)
def test_a_whole_number_is_read_as_people_write_it(text, value):
    assert _field("integer").parse(text) == value


@pytest.mark.parametrize("text", ["1.5", "0,5", "1,5", "1,0000", "abc", "1e999", "nan", "", "0x10", "9" * 5000 + ".5"])
def test_what_is_not_a_whole_number_is_refused(text):
    with pytest.raises(ValueError, match=r"^is not a whole number$|^is required$"):
        _field("integer", is_required=True).parse(text)


def test_a_comma_is_never_taken_for_a_decimal_point_or_dropped_from_one():
    number = _field("number")

    assert number.parse("1,000.5") == 1000.5
    for text in ("0,001", "0,5", "1,5", "3,14159"):
        with pytest.raises(ValueError, match=r"^is not a number$"):
            number.parse(text)


@pytest.mark.parametrize("text", ["inf", "-Infinity", "nan", "1e999"])
def test_a_number_must_be_finite_also_without_a_range(text):
    with pytest.raises(ValueError, match=r"^is not a finite number$"):
        _field("number", minimum=0.0).parse(text)


@pytest.mark.parametrize(
    ("options", "words", "inside", "outside"),
    [
        ({"minimum": 1.0, "maximum": 65536.0}, "from 1 up to 65,536", ["1", "65536"], ["0", "65537"]),
        ({"above": 0.0, "below": 1.0}, "above 0 below 1", ["0.001", "0.999"], ["0", "1"]),
        ({"maximum": 4294967295.0}, "up to 4,294,967,295", ["-5", "4294967295"], ["4294967296"]),
        ({"above": 1e-9}, "above 1e-09", ["1"], ["0"]),
        ({"maximum": 3e38}, "up to 3e+38", ["1"], ["4e38"]),
    ],
)
def test_a_range_is_shown_in_words_and_checked(options, words, inside, outside):
    field = _field("number", **options)

    assert field.range_text == words
    for text in inside:
        assert field.parse(text) == float(text)
    for text in outside:
        with pytest.raises(ValueError, match=f"^must lie {words.replace('+', '.')}$"):
            field.parse(text)


def test_a_range_does_not_apply_to_true_and_false():
    assert _field("json", minimum=5.0).parse("true") is True
    assert _field("text").range_text == ""


def test_messages_name_what_would_be_accepted():
    with pytest.raises(ValueError, match=r"^is neither true nor false$"):
        _field("flag").parse("yes")
    with pytest.raises(ValueError, match=r"^is none of tanh, relu$"):
        _field("choice", choices=("tanh", "relu")).parse("gelu")
    with pytest.raises(ValueError, match=r"^is not JSON \("):
        _field("json").parse("[64, 64")


def test_json_is_strict():
    for text in ('{"a": 1, "a": 2}', "[NaN]", "[1e999]", "[" * 100_000):
        with pytest.raises(ValueError, match=r"^is not JSON"):
            _field("json").parse(text)


def test_a_field_that_takes_a_number_or_a_word_needs_no_quotation_marks():
    field = _only_field({"anyOf": [{"type": "number"}, {"type": "string"}], "default": "auto"})

    assert (field.kind, field.allows_text) == ("json", True)
    assert [field.parse(text) for text in ("auto_0.1", "0.1", '"0.1"')] == ["auto_0.1", 0.1, "0.1"]
    assert [field.format(value) for value in ("auto_0.1", 0.1, "0.1")] == ["auto_0.1", "0.1", '"0.1"']


def test_a_number_that_a_configuration_file_holds_as_text_is_a_number():
    assert _field("number").parse(_field("number").format("3e-4")) == 0.0003


def test_a_text_keeps_the_spaces_and_line_breaks_between_its_quotation_marks():
    field = _field("text")

    assert field.format(" a\n") == '" a\\n"'
    assert field.parse('" a\\n"') == " a\n"
    assert field.parse('"open') == '"open'
    assert field.parse('"a" and "b"') == '"a" and "b"'


# ---------------------------------------------------------------------- fields of a schema


def test_nested_objects_become_dotted_keys_in_groups_and_take_the_defaults_of_their_parent():
    schema = {
        "properties": {
            "name": {"type": "string", "default": ""},
            "trainer": {"$ref": "#/$defs/Trainer", "default": {"steps": 100}},
        },
        "$defs": {"Trainer": {"type": "object", "properties": {"steps": {"type": "integer", "default": 5}}}},
    }

    name, steps = fields_of(schema)

    assert (name.path, name.group, name.kind, name.default) == ("name", GENERAL, "text", "")
    assert (steps.path, steps.title, steps.group, steps.default) == ("trainer.steps", "steps", "trainer", 100)


def test_a_required_field_with_a_default_is_not_required_and_nested_ones_know_their_own_parent():
    schema = {
        "required": ["a", "b", "inner"],
        "properties": {
            "a": {"type": "string"},
            "b": {"type": "string", "default": "x"},
            "inner": {"properties": {"a": {"type": "string"}, "c": {"type": "string"}}, "required": ["c"]},
        },
    }

    assert {field.path for field in fields_of(schema) if field.is_required} == {"a", "inner.c"}


def test_objects_below_the_third_level_are_one_field_of_json():
    leaf = {"properties": {"x": {"type": "integer"}}}
    schema = {"properties": {"a": {"properties": {"b": {"properties": {"c": leaf}}}}}}

    assert [(field.path, field.kind) for field in fields_of(schema)] == [("a.b.c", "json")]


@pytest.mark.parametrize(
    ("part", "kind", "can_be_empty", "choices"),
    [
        ({"type": "boolean"}, "flag", False, (True, False)),
        ({"type": ["boolean", "null"]}, "flag", True, (True, False, None)),
        ({"type": ["integer"]}, "integer", False, ()),
        ({"type": ["integer", "string", "null"]}, "json", True, ()),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, "number", True, ()),
        ({"oneOf": [{"type": "integer"}, {"type": "object"}]}, "json", False, ()),
        ({"anyOf": [{"type": "null"}]}, "json", True, ()),
        ({"anyOf": [{"type": ["integer", "null"]}]}, "integer", True, ()),
        ({"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}, "choice", True, ("a", "b", None)),
        ({"anyOf": [{"const": "auto"}, {"type": "integer"}]}, "json", False, ()),
        ({"enum": ["a", None]}, "choice", False, ("a", None)),
        ({"const": 1}, "choice", False, (1,)),
        ({"allOf": [{"type": "integer"}], "default": 3}, "integer", False, ()),
        ({"type": "array", "items": {"type": "integer"}}, "json", False, ()),
        ({"type": "object", "additionalProperties": True}, "json", False, ()),
        ({}, "json", False, ()),
        (True, "json", False, ()),
        ({"$ref": "#/$defs/missing"}, "json", False, ()),
        ({"$ref": "#/$defs/Loop"}, "json", False, ()),
    ],
)
def test_the_kind_of_a_field_follows_its_schema(part, kind, can_be_empty, choices):
    field = _only_field(part, **{"$defs": {"Loop": {"$ref": "#/$defs/Loop"}}})

    assert (field.kind, field.can_be_empty, field.choices) == (kind, can_be_empty, choices)


def test_a_constant_word_beside_a_number_can_be_typed_without_quotation_marks():
    assert _only_field({"anyOf": [{"const": "auto"}, {"type": "integer"}]}).parse("auto") == "auto"


def test_bounds_units_and_descriptions_come_from_the_schema():
    field = _only_field(
        {"type": "number", "minimum": 1, "exclusiveMaximum": 5, "maximum": True, "description": "Two\n   lines."}
    )

    assert (field.minimum, field.maximum, field.above, field.below) == (1.0, None, None, 5.0)
    assert field.description == "Two lines."


def test_the_unit_is_the_end_of_the_name():
    units = {"timeout_s": "s", "every_seconds": "s", "delay_ms": "ms", "memory_mb": "MB", "n_steps": "steps", "eps": ""}
    fields = fields_of({"properties": {name: {"type": "number"} for name in units}})

    assert {field.path: field.unit for field in fields} == units


def test_a_field_that_the_runner_hides_is_not_shown():
    assert fields_of({"properties": {"x": {"type": "string", "x-hidden": True}}}) == []


def test_a_schema_without_properties_has_no_fields():
    assert fields_of({}) == fields_of({"properties": None}) == []


# ---------------------------------------------------------------------- forms


SCHEMA = {
    "required": ["id"],
    "properties": {
        "id": {"type": "string"},
        "seed": {"type": "integer", "default": 0, "minimum": 0},
        "trainer": {
            "properties": {
                "steps": {"type": ["integer", "null"], "default": 100},
                "rate": {"type": "number", "default": 1},
                "fast": {"type": "boolean", "default": False, "description": "Spend memory."},
                "hidden": {"type": "array", "default": [64, 64]},
            }
        },
    },
}


def test_changes_are_nested_and_hold_nothing_that_equals_its_default():
    form = Form(SCHEMA)
    for path, text in {"seed": "0", "trainer.steps": "50", "trainer.rate": "1.0", "trainer.hidden": "[64,64]"}.items():
        form.set_text(path, text)

    assert form.changes() == {"trainer": {"steps": 50}}


def test_null_is_a_change_of_a_field_whose_default_is_something_else():
    form = Form(SCHEMA)
    form.load({"trainer": {"steps": None}})

    assert form.text("trainer.steps") == "none"
    assert form.changes() == {"trainer": {"steps": None}}


def test_true_is_not_one():
    form = Form({"properties": {"x": {"default": 1}, "y": {"default": {"a": [0]}}}})
    form.load({"x": True, "y": {"a": [False]}})

    assert form.changes() == {"x": True, "y": {"a": [False]}}


@given(
    values=st.fixed_dictionaries(
        {},
        optional={
            "id": st.text(min_size=1),
            "seed": st.integers(0, 2**64),
            "trainer.steps": st.none() | st.integers(),
            "trainer.rate": _FINITE,
            "trainer.fast": st.booleans(),
            "trainer.hidden": st.lists(st.integers()),
        },
    )
)
def test_changes_are_exactly_the_loaded_values_that_differ_from_their_defaults(values):
    nested: dict = {}
    for path, value in values.items():
        group, _, name = path.rpartition(".")
        (nested.setdefault(group, {}) if group else nested)[name] = value
    form = Form(SCHEMA)
    form.load(copy.deepcopy(nested))
    defaults = {"seed": 0, "trainer.steps": 100, "trainer.rate": 1, "trainer.fast": False, "trainer.hidden": [64, 64]}

    changes = {path: value for path, value in flatten(form.changes()).items() if path != "trainer"}

    assert changes == {path: value for path, value in values.items() if path == "id" or value != defaults[path]}


@given(texts=st.dictionaries(st.sampled_from(sorted(Form(SCHEMA).fields)), st.text(max_size=8)))
def test_whatever_is_typed_a_form_either_names_a_problem_or_has_changes_that_it_reads_back(texts):
    form = Form(SCHEMA)
    for path, text in texts.items():
        form.set_text(path, text)
    problems = {path for path in form.problems() if form.text(path)}
    if problems:
        with pytest.raises(ValueError, match=f"^({'|'.join(map(_escaped, sorted(problems)))}) "):
            form.changes()
        return

    again = Form(SCHEMA)
    again.load(form.changes())

    assert again.changes() == form.changes()


def _escaped(path):
    return path.replace(".", r"\.")


def test_the_first_field_that_cannot_be_used_is_named_with_the_reason():
    form = Form(SCHEMA)
    form.set_text("seed", "-1")

    assert form.problems() == {"id": "is required", "seed": "must lie from 0"}
    with pytest.raises(ValueError, match=r"^seed must lie from 0$"):
        form.changes()


def test_a_message_of_the_service_stays_beside_its_field_until_the_text_changes():
    form = Form(SCHEMA)
    form.add_remark("seed", "is taken")
    assert form.problem("seed") == "is taken"
    form.set_text("seed", "-1")
    form.add_remark("seed", "is taken")
    assert form.problem("seed") == "must lie from 0"

    form.set_text("seed", "7")

    assert form.problem("seed") == ""


@pytest.mark.parametrize(
    "forget", [Form.clear_remarks, lambda form: form.load({}), lambda form: form.set_schema(SCHEMA)]
)
def test_messages_about_earlier_values_are_forgotten(forget):
    form = Form(SCHEMA)
    form.add_remark("seed", "is taken")
    forget(form)

    assert form.problem("seed") == ""


def test_forgetting_no_messages_is_no_change():
    form = Form(SCHEMA)
    before = form.revision
    form.clear_remarks()

    assert form.revision == before


def test_the_field_of_a_key_is_the_one_that_holds_it():
    form = Form({"properties": {"algorithm": {"type": "object"}, "seed": {"type": "integer"}}})

    assert form.find_field("algorithm.batch_size").path == "algorithm"
    assert form.find_field("seed").path == "seed"
    assert form.find_field("env.kwargs") is form.find_field("") is None


def test_the_same_text_again_is_no_change_and_an_empty_one_returns_to_the_default():
    form = Form(SCHEMA)
    form.set_text("seed", "7")
    before = form.revision
    form.set_text("seed", " 7 ")
    assert form.revision == before

    form.set_text("seed", " ")

    assert (form.text("seed"), form.changes(), form.revision) == ("", {}, before + 1)


def test_another_schema_keeps_the_texts_of_fields_that_it_also_has_and_ignores_the_others():
    form = Form(SCHEMA)
    form.set_text("seed", "7")
    form.set_text("trainer.rate", "2")

    form.set_schema({"properties": {"seed": {"type": "integer", "default": 7}}})
    assert form.changes() == {}
    form.set_schema(SCHEMA, hidden=("trainer.rate",))

    assert form.changes() == {"seed": 7}
    assert "trainer.rate" not in form.fields


def test_loading_replaces_what_was_entered_and_leaves_out_what_the_schema_does_not_have():
    form = Form(SCHEMA)
    form.set_text("seed", "7")
    form.load({"trainer": {"fast": True, "unknown": 1}, "seed": None, "other": {}})

    assert form.changes() == {"trainer": {"fast": True}}


def test_a_search_finds_words_of_paths_and_descriptions_in_any_order():
    form = Form(SCHEMA)

    assert list(form.groups()) == [GENERAL, "trainer"]
    assert [field.path for field in form.groups("MEMORY spend")["trainer"]] == ["trainer.fast"]


def test_a_search_without_a_match_offers_what_is_spelled_alike():
    form = Form(SCHEMA)

    assert [field.path for field in form.groups("trnstps")["trainer"]] == ["trainer.steps"]
    assert form.groups("zzz") == {}


def test_flatten_keeps_empty_mappings_lists_and_the_parents_of_nested_values():
    assert flatten({"a": {"b": 1}, "c": {}, "d": [{"e": 1}]}) == {"a": {"b": 1}, "a.b": 1, "c": {}, "d": [{"e": 1}]}


# ---------------------------------------------------------------------- the schemas of the runners


def _own_schema(name, capsys):
    """The schema that `palaestra schema NAME` prints."""
    print_schema(name)
    return json.loads(capsys.readouterr().out)


def _schemas(capsys):
    spec = RunSpec(runner="cleanrl", script="shaped", checkout=str(CHECKOUT))
    return {
        **{name: _own_schema(name, capsys) for name in ("run", "ui", "ppo")},
        "sb3": Sb3Config.model_json_schema(),
        "echo": EchoRunner().config_schema(RunSpec(runner="echo")),
        "cleanrl": CleanrlRunner().config_schema(spec),
    }


def test_every_runners_defaults_are_valid_and_come_back_from_their_text(capsys):
    for name, schema in _schemas(capsys).items():
        form = Form(schema)
        assert form.fields, name
        for field in form.fields.values():
            if field.default is not UNSET and field.format(field.default):
                assert field.parse(field.format(field.default)) == field.default, (name, field.path)
            assert field.is_required or field.parse("") is UNSET
        assert form.changes() == {}


def test_the_form_of_our_own_trainer_has_choices_ranges_and_empty_values(capsys):
    form = Form(_own_schema("run", capsys))

    assert Form().fields == {}
    assert form.fields["env.vectorization"].choices == ("auto", "in_process", "workers", "native")
    assert form.fields["trainer.seed"].range_text == "from 0 up to 4,294,967,295"
    assert form.fields["trainer.total_timesteps"].can_be_empty
    assert form.fields["policy.hidden"].parse("[32]") == [32]
    assert {path for path, reason in form.problems().items() if reason == "is required"} == {"env.id"}


def test_the_form_of_a_cleanrl_script_hides_what_the_script_computes(capsys):
    schema = _schemas(capsys)["cleanrl"]
    form = Form(schema)

    assert "num_iterations" in schema["properties"]
    assert "num_iterations" not in form.fields
    assert form.fields["learning_rate"].default == 0.00025


@pytest.mark.parametrize("kind", ["integer", "number", "json"])
def test_a_number_of_400_digits_is_a_problem_of_its_field(kind):
    with pytest.raises(ValueError, match="is not a finite number"):
        _field(kind).parse("9" * 400)


def test_an_optional_object_becomes_fields_that_need_not_be_given_and_a_dataset_is_a_kind_of_its_own():
    schema = {
        "$defs": {
            "Data": {
                "properties": {
                    "id": {"type": "string", "x-choices": "datasets"},
                    "mix": {"type": "number", "default": 0.0},
                },
                "required": ["id"],
            }
        },
        "properties": {"dataset": {"anyOf": [{"$ref": "#/$defs/Data"}, {"type": "null"}], "default": None}},
    }
    form = Form(schema)
    assert [(one.path, one.kind, one.is_required) for one in form.fields.values()] == [
        ("dataset.id", "dataset", False),
        ("dataset.mix", "number", False),
    ]
    assert (form.changes(), form.problems(), form.has_kind("dataset")) == ({}, {}, True)
    form.set_text("dataset.id", "pendulum/medium-v0")
    assert form.changes() == {"dataset": {"id": "pendulum/medium-v0"}}
    form.load({"dataset": None})
    assert form.changes() == {}
