"""The tasks themselves, without a browser: what follows from the seed, what is judged how, what is refused."""

import json
import re

import pytest

from palaestra.errors import SessionRefused
from palaestra.sessions.suite import PageRequest
from palaestra.sessions.suites import make_task, suites
from palaestra.sessions.suites.click_target import LEVELS
from palaestra.sessions.suites.miniwob import inline_resources


def test_a_harder_target_means_more_and_smaller_buttons():
    counts = [make_task("click_target", "button", 5, {"difficulty": n}).html.count("<button") for n in range(1, 9)]
    assert counts == [count for count, _, _ in LEVELS] == [1, 1, 2, 3, 4, 6, 8, 12]


@pytest.mark.parametrize("seed", range(20))
def test_buttons_lie_on_the_screen_and_apart(seed):
    html = make_task("click_target", "button", seed, {"difficulty": 8}).html
    boxes = [
        tuple(map(int, found)) for found in re.findall(r"left:(\d+)px;top:(\d+)px;width:(\d+)px;height:(\d+)px", html)
    ]
    assert len(boxes) == 12
    for n, (x, y, w, h) in enumerate(boxes):
        assert x + w <= 160
        assert y + h <= 210
        for a, b, c, d in boxes[n + 1 :]:
            assert x + w <= a or a + c <= x or y + h <= b or b + d <= y


def test_the_first_button_decides():
    task = make_task("click_target", "button", 5, {"difficulty": 3})
    wanted = task.instruction(None).split('"')[1]
    assert task.judge(None).done is False
    assert (task.judge(wanted).reward, task.judge(wanted).success) == (1.0, True)
    assert (task.judge("other").done, task.judge("other").reward) == (True, 0.0)


def _submit(task, body):
    return task.serve(PageRequest("POST", "/submit", body if isinstance(body, bytes) else json.dumps(body).encode()))


def test_rows_earn_their_share_and_mistakes_cost_a_tenth():
    task = make_task("data_entry", "form", 3, {"rows": 5, "wanted": 2})
    first, second = task._wanted
    assert (
        task.instruction(None)
        == f"Enter rows {first} and {second} of the sheet into the form, one at a time, and submit each."
    )
    people = [dict(zip(("first", "last", "email"), person, strict=True)) for person in task._people]
    _submit(task, people[first - 1])
    assert (task.judge(None).reward, task.judge(None).done) == (0.5, False)
    _submit(task, people[first - 1])  # again
    _submit(task, {"first": "Unknown"})
    _submit(task, b"\xff not JSON")
    assert task.judge(None).reward == pytest.approx(0.2)
    assert task.judge(None).detail["wrong_submissions"] == 3
    _submit(task, people[second - 1])
    found = task.judge(None)
    assert (found.done, found.success, found.reward) == (True, False, pytest.approx(0.7))
    assert found.detail["submitted_rows"] == [first, second]


def _labels_and_values(task):
    return dict(re.findall(r"<span class=label>(\w+)</span><span class=value>(\w+)</span>", task.html))


def _input_labels(task):
    return re.findall(r'<input name="(\w+)"', task.html)


@pytest.mark.parametrize("seed", range(20))
def test_one_exact_field_is_worth_one_and_a_wrong_one_costs_one(seed):
    task = make_task("data_entry", "field", seed, {})
    ((label, value),) = _labels_and_values(task).items()
    assert task.instruction(None) == f"Type the {label.lower()} into the field and press Submit."
    assert _input_labels(task) == [label]
    assert re.fullmatch(r"[A-Z][a-z]{2,5}|[1-9]\d{2,4}", value)
    assert (task.judge(None).reward, task.judge(None).done) == (0.0, False)
    _submit(task, {label: value})
    result = task.judge(None)
    assert (result.reward, result.done, result.success) == (1.0, True, True)


@pytest.mark.parametrize(
    ("change", "reward", "exact"),
    [
        (lambda first, second: [first, second], 1.0, 2),
        (lambda first, second: [first, second + " "], -0.5, 1),
        (lambda first, second: ["", second], -0.5, 1),
        (lambda first, second: [second, first], -1.0, 0),
        (lambda first, second: [first.lower() + ".", ""], -1.0, 0),
    ],
)
def test_two_fields_are_paid_by_the_share_that_is_exact(change, reward, exact):
    task = make_task("data_entry", "fields", 4, {})
    values = _labels_and_values(task)
    labels = _input_labels(task)
    assert sorted(values) == sorted(labels)
    _submit(task, dict(zip(labels, change(*(values[label] for label in labels)), strict=True)))
    result = task.judge(None)
    assert (result.reward, result.done, result.success) == (reward, True, reward == 1.0)
    assert result.detail == {"exact_fields": exact, "fields": 2}


@pytest.mark.parametrize("body", [b"", b"\xff", b"[1]", b"null", b'{"Name": ["x"]}'])
def test_only_the_first_submission_of_fields_counts_and_an_unreadable_one_is_wrong(body):
    task = make_task("data_entry", "fields", 4, {})
    _submit(task, body)
    _submit(task, _labels_and_values(task))
    assert (task.judge(None).reward, task.judge(None).done, task.judge(None).success) == (-1.0, True, False)


def test_values_and_fields_have_independent_orders():
    tasks = [make_task("data_entry", "fields", seed, {}) for seed in range(100)]
    same = sum(list(_labels_and_values(task)) == _input_labels(task) for task in tasks)
    assert 30 < same < 70


def test_distractors_are_shown_and_not_asked_for():
    for name, count in (("field", 1), ("fields", 2)):
        task = make_task("data_entry", name, 7, {"distractors": 3})
        assert len(_labels_and_values(task)) == count + 3
        assert len(_input_labels(task)) == count
        assert all(label.lower() in task.instruction(None).lower() for label in _input_labels(task))


def test_values_of_other_seeds_are_almost_all_new():
    def values(seeds):
        return [v for seed in seeds for v in _labels_and_values(make_task("data_entry", "fields", seed, {})).values()]

    known = set(values(range(1000)))
    fresh = values(range(10_000, 10_500))
    assert sum(value in known for value in fresh) < 0.05 * len(fresh)


def test_the_same_seed_is_the_same_task_and_another_is_another():
    tasks = [("click_target", "button"), ("data_entry", "form"), ("data_entry", "field"), ("data_entry", "fields")]
    for suite, name in tasks:
        same, again, other = (make_task(suite, name, seed, {}) for seed in (3, 3, 4))
        assert same.html == again.html
        assert same.html != other.html


@pytest.mark.parametrize(
    ("task", "params", "code", "message"),
    [
        ("clik_target/button", {}, "unknown_task", "Did you mean 'click_target'?"),
        ("click_target/buton", {}, "unknown_task", "Did you mean 'click_target/button'?"),
        ("click_target/button", {"dificulty": 2}, "bad_params", "Did you mean 'difficulty'?"),
        ("click_target/button", {"difficulty": 9}, "bad_params", "between 1 and 8"),
        ("click_target/button", {"difficulty": True}, "bad_params", "of type int"),
        ("click_target/button", {"step_limit": 0}, "bad_params", "at least 1"),
        ("data_entry/form", {"wanted": 4, "rows": 3}, "bad_params", "wanted <= rows"),
        ("data_entry/form", {"rows": 99}, "bad_params", "rows <= 14"),
        ("data_entry/form", {"font_px": 14}, "bad_params", "unknown"),
        ("data_entry/field", {"distractors": 4}, "bad_params", "between 0 and 3"),
        ("data_entry/field", {"distractors": -1}, "bad_params", "between 0 and 3"),
        ("data_entry/fields", {"font_px": 9}, "bad_params", "between 10 and 16"),
        ("data_entry/fields", {"font_px": 14.0}, "bad_params", "of type int"),
        ("data_entry/fields", {"step_limit": 0}, "bad_params", "at least 1"),
        ("data_entry/fields", {"rows": 3}, "bad_params", "unknown"),
    ],
)
def test_what_is_no_task_is_refused_with_the_nearest(task, params, code, message):
    suite, _, name = task.partition("/")
    with pytest.raises(SessionRefused) as refused:
        make_task(suite, name, 0, params)
    assert refused.value.code == code
    assert message in str(refused.value)


needs_miniwob = pytest.mark.skipif(not suites()["miniwob"].names(), reason="the miniwob package is not installed")


@needs_miniwob
def test_an_instruction_in_another_wording_has_the_quoted_parts_of_the_pages_own_and_hides_the_bar():
    own = 'Enter the username "ada" and the password "x {1}" into the text fields and press login.'
    task = make_task("miniwob", "login-user", 3, {"instruction": "Sign in {1}, whose password is {2}."})
    assert task.instruction(own) == "Sign in ada, whose password is x {1}."
    assert "#query{visibility:hidden" in task.begin
    assert "#query" in make_task("miniwob", "login-user", 3, {"hide_bar": True}).begin
    plain = make_task("miniwob", "login-user", 3, {})
    assert plain.instruction(own) == own
    assert "#query" not in plain.begin
    with pytest.raises(SessionRefused, match=r"has \{3\}, and .* has 2 quoted parts"):
        make_task("miniwob", "login-user", 3, {"instruction": "Type {3}."}).instruction(own)


def test_miniwob_serves_its_own_files_and_nothing_else():
    if not suites()["miniwob"].names():
        pytest.skip("the miniwob package is not installed")
    task = make_task("miniwob", "click-button", 3, {})
    assert task.serve(PageRequest("GET", "/core/core.js", b"")).body.startswith(b"var core")
    for path in ("/../__init__.py", "/core/../../__init__.py", "/etc/passwd", "/", "//etc/passwd"):
        assert task.serve(PageRequest("GET", path, b"")) is None
    assert (task.judge([True, 0.5, None]).success, task.judge([True, 1.0, None]).success) == (False, True)


def test_a_miniwob_page_comes_in_one_piece_and_keeps_what_has_an_encoding_of_its_own():
    if not suites()["miniwob"].names():
        pytest.skip("the miniwob package is not installed")

    def page(name):
        task = make_task("miniwob", name, 3, {})
        return task.serve(PageRequest("GET", task.entry, b"")).body

    dialog = page("click-dialog")
    assert b'<script src="' not in dialog
    assert b'<link rel="stylesheet"' not in dialog
    assert b'url("images/' not in dialog
    assert dialog.index(b"var core") < dialog.index(b"<script>/*! jQuery UI") < dialog.index(b"var genProblem")
    # Its three libraries begin with a byte order mark.
    assert page("click-pie").count(b'<script src="') == 3


def test_a_page_keeps_the_names_of_what_cannot_be_written_into_it():
    files = {
        "/a/one.js": b"f()", "/a/two.js": b"g('</SCRIPT>')", "/a/three.js": b"h('\xc3\xa9')",
        "/css/all.css": b'p{background:url("dot.png")}b{background:url(gone.png)}', "/css/dot.png": b"dot",
    }  # fmt: skip
    tags = b"".join(b'<script src="../a/%s.js"></script>' % name for name in (b"one", b"two", b"three", b"four"))
    page = b'<link rel="stylesheet" href="../css/all.css">' + tags
    assert inline_resources(page, "/tasks/page.html", files.get) == (
        b'<style>p{background:url("data:image/png;base64,ZG90")}b{background:url("/css/gone.png")}</style>'
        b'<script>f()</script><script src="../a/two.js"></script><script src="../a/three.js"></script>'
        b'<script src="../a/four.js"></script>'
    )


def test_the_page_s_own_task_is_one(tmp_path):
    from pathlib import Path

    page = (Path(__file__).parents[2] / "docs" / "sessions.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    scope: dict = {}
    exec(code, scope)
    task = scope["Greetings"]().make("hello", 4, {})
    assert task.instruction(None) == "Write Ben into the field."
    assert task.judge("Ben").success
    assert not task.judge("Be").done


@pytest.mark.parametrize(
    ("task", "low"),
    [
        ("miniwob/click-test", -1.0),
        ("click_target/button", 0.0),
        ("data_entry/field", -1.0),
        ("data_entry/fields", -1.0),
        ("data_entry/form", -1.0),
    ],
)
def test_every_suite_declares_what_an_episode_can_be_paid(task, low):
    assert make_task(*task.split("/"), 3, {}).reward_range == (low, 1.0)


def test_any_number_of_wrong_submissions_costs_no_more_than_the_declared_least():
    task = make_task("data_entry", "form", 3, {})
    for _ in range(50):
        _submit(task, {"first": "Unknown"})
    assert task.judge(None).reward == -1.0
