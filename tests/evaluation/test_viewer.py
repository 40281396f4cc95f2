"""The viewer is one file, shows what was recorded, and runs nothing that a model wrote."""

import asyncio
import hashlib
import json
import re
import time
from html.parser import HTMLParser
from importlib.resources import files

import pytest
from tests.experience.episodes import HEIGHT, SCREEN, SHA, WIDTH, episode, png, turn

from palaestra.errors import ConfigError
from palaestra.evaluation.viewer import ViewedEpisode, viewer_link, write_viewer
from palaestra.experience.trajectory import Outcome
from palaestra.experience.turn_credit import EpisodeCredit
from palaestra.sessions.browser.browser import Browser
from palaestra.sessions.browser.chromium import find_chromium
from palaestra.sessions.screen import Size

HOSTILE = "</script><img src=x onerror=\"window.harmed='yes'\"><!--<script>window.harmed='yes'</script>"


class _Blocks(HTMLParser):
    """The page as a browser's parser sees it: every tag, and the text of the inert blocks."""

    def __init__(self):
        super().__init__()
        self.tags, self.blocks, self._open = [], {}, None

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._open = dict(attrs).get("id") if tag == "script" else None

    def handle_data(self, data):
        if self._open:
            self.blocks[self._open] = self.blocks.get(self._open, "") + data


def blocks(path):
    page = _Blocks()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def test_a_picture_that_many_turns_show_is_in_the_file_once(tmp_path):
    other = png(90)
    sha = hashlib.sha256(other).hexdigest()
    path = tmp_path / "view.html"
    written = write_viewer(
        [
            episode(turn(), turn(pictures=(SHA, sha), image_sizes=((1, 1),) * 2), pictures={SHA: SCREEN, sha: other}),
            episode(turn(), episode_id="e2"),
        ],
        path,
    )  # fmt: skip
    assert (written.trajectories, written.pictures, written.picture_directory) == (2, 2, None)
    assert written.bytes == path.stat().st_size
    page = blocks(path)
    assert [name for name in page.blocks if re.fullmatch(r"p\d+", name)] == ["p0", "p1"]
    assert json.loads(page.blocks["t0"])["turns"][1]["pictures"] == [0, 1]
    assert [file.name for file in tmp_path.iterdir()] == ["view.html"]


def test_pictures_lie_beside_a_file_that_would_be_too_large(tmp_path):
    path = tmp_path / "view.html"
    inside = write_viewer([episode()], path, max_bytes=10**6)
    assert inside.picture_directory is None
    beside = write_viewer([episode()], path, max_bytes=inside.bytes - len(SCREEN))
    assert beside.bytes < inside.bytes
    (picture,) = (tmp_path / "view_pictures").iterdir()
    assert picture.read_bytes() == SCREEN
    assert picture.name == f"{SHA}.png"
    assert json.loads(blocks(path).blocks["facts"])["files"] == [picture.name]
    write_viewer([episode()], path)
    assert not (tmp_path / "view_pictures").exists()  # what it wrote itself, it clears away


def test_a_directory_with_something_else_in_it_is_not_taken_over(tmp_path):
    (tmp_path / "view_pictures").mkdir()
    (tmp_path / "view_pictures" / "holiday.png").write_text("mine")
    with pytest.raises(ConfigError, match="something else"):
        write_viewer([episode()], tmp_path / "view.html")
    assert (tmp_path / "view_pictures" / "holiday.png").read_text() == "mine"
    with pytest.raises(ConfigError, match="is a directory"):
        write_viewer([episode()], tmp_path)


def test_a_page_that_fails_half_way_leaves_the_former_one(tmp_path):
    path = tmp_path / "view.html"
    write_viewer([episode()], path)
    before = path.read_bytes()

    def breaking():
        yield episode()
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="disk"):
        write_viewer(breaking(), path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["view.html"]


def test_hostile_text_stays_inside_its_block(tmp_path):
    path = tmp_path / "view.html"
    made = episode(
        turn(text=HOSTILE, action={"kind": "type", "text": HOSTILE}), turn(unreadable=HOSTILE, text=HOSTILE),
        episode_id=HOSTILE, reason=HOSTILE, detail={HOSTILE: float("nan")}, outcome=Outcome.FAILURE,
        task={"task": HOSTILE, "seed": 0, "instruction": HOSTILE, "params": {"x": HOSTILE}},
    )  # fmt: skip
    write_viewer([made], path, title=HOSTILE, texts=lambda ids: [HOSTILE] * len(ids))
    page = blocks(path)
    assert "img" not in page.tags
    assert page.tags.count("script") == 4  # episode, picture, facts, and the one that runs
    assert json.loads(page.blocks["t0"])["turns"][0]["text"] == HOSTILE
    assert json.loads(page.blocks["t0"])["detail"] == {HOSTILE: "NaN"}


def test_the_script_never_makes_markup_of_text():
    script = (files("palaestra.evaluation") / "assets" / "viewer.js").read_text()
    for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval", "Function(", "fetch(", "http:"):
        assert way not in script.replace("http://www.w3.org/2000/svg", "")
    assert "</script" not in script
    assert "<!--" not in script


# ---------------------------------------------------------------------- in a real browser

try:
    find_chromium()
    needs_browser = pytest.mark.skipif(False, reason="")
except ConfigError as missing:
    needs_browser = pytest.mark.skip(reason=str(missing))


def in_browser(path, *steps):
    """What each step answers, in one page; a dict presses a key, text is evaluated."""

    async def run():
        browser = await Browser.start()
        try:
            page = await browser.open(Size(1200, 900))
            wrong = []
            browser.cdp.subscribe(page.session, lambda method, params: _complaint(method, params, wrong))

            async def call(method, **given):
                return await browser.cdp.call(method, given, session=page.session, timeout=30.0)

            async def ask(expression):
                answer = await call("Runtime.evaluate", expression=expression, returnByValue=True)
                assert "exceptionDetails" not in answer, answer
                return answer["result"].get("value")

            await call("Runtime.enable")
            await call("Log.enable")
            await call("Page.navigate", url=path.as_uri())
            while await ask("document.documentElement?.dataset.ready") != "yes":
                await browser.tick(page, 1000 * time.monotonic(), timeout=30.0)
            answers = []
            for step in steps:
                if isinstance(step, dict):
                    await call("Input.dispatchKeyEvent", type="keyDown", **step)
                    continue
                while (found := await ask(step)) == "wait":
                    await browser.tick(page, 1000 * time.monotonic(), timeout=30.0)
                answers.append(found)
            assert wrong == []
            return answers
        finally:
            await browser.stop()

    return asyncio.run(run())


def _complaint(method, params, wrong):
    if method in ("Runtime.exceptionThrown", "Log.entryAdded"):
        wrong.append(params)


MARK = """(() => { const svg = document.querySelector('.screen svg'), img = document.querySelector('.screen img');
  if (!svg || !img.complete || !img.naturalWidth) return 'wait';
  const box = svg.querySelector('.over').getBBox();
  const over = svg.getBoundingClientRect(), at = img.getBoundingClientRect();
  return [svg.getAttribute('viewBox'), box.x + box.width / 2, box.y + box.height / 2,
    Math.round(over.width - at.width), Math.round(over.left - at.left), img.naturalWidth]; })()"""


@needs_browser
def test_the_predicted_point_is_drawn_on_the_screen_in_its_pixels(tmp_path):
    path = tmp_path / "view.html"
    write_viewer([episode()], path)
    (found,) = in_browser(path, {"key": "j", "text": "j"}, MARK)
    assert found == [f"0 0 {WIDTH} {HEIGHT}", 60.5, 35.5, 0, 0, WIDTH]


@needs_browser
@pytest.mark.parametrize("kind", ["WEBP", "JPEG"])
def test_pictures_are_shown_as_they_were_recorded_inside_or_beside(tmp_path, kind):
    data = png(kind=kind)
    sha = hashlib.sha256(data).hexdigest()
    made = episode(turn(pictures=(sha,)), pictures={sha: data})
    for max_bytes in (10**6, 0):
        path = tmp_path / f"view {max_bytes}#.html"
        write_viewer([made], path, max_bytes=max_bytes)
        (found,) = in_browser(path, {"key": "j", "text": "j"}, MARK)
        assert found[-1] == WIDTH


@needs_browser
def test_drags_scrolls_and_clicks_without_a_place_are_drawn_and_typing_is_not(tmp_path):
    actions = [
        {"kind": "drag", "path": [[10, 10], [50, 20], [90, 80]]}, {"kind": "scroll", "at": None, "dx": 0, "dy": 100},
        {"kind": "click", "at": None, "times": 2}, {"kind": "type", "text": "x"},
    ]  # fmt: skip
    path = tmp_path / "view.html"
    write_viewer([episode(*[turn(action=action) for action in actions])], path)
    drawn, dashed, middle = in_browser(
        path, {"key": "j", "text": "j"},
        "[...document.querySelectorAll('.turn')].map((t) => t.querySelector('svg')?.dataset.kind ?? '')",
        "[...document.querySelectorAll('.turn')].map((t) => t.querySelectorAll('.guess').length)",
        "(() => { const b = document.querySelectorAll('.turn')[2].querySelector('.over').getBBox();"
        " return [b.x + b.width / 2, b.y + b.height / 2]; })()",
    )  # fmt: skip
    assert drawn == ["drag", "scroll", "click", ""]
    assert dashed == [0, 1, 1, 0]
    assert middle == pytest.approx([90.5, 80.5], abs=1e-3)  # where the drag left the pointer


@needs_browser
def test_the_list_is_filtered_by_task_outcome_version_and_words(tmp_path):
    made = [
        episode(
            turn(versions=[i, i], text=f"word{i}"), episode_id=f"e{i}", outcome=list(Outcome)[i % 5],
            task={"task": f"suite/t{i % 2}", "seed": i},
        )
        for i in range(10)
    ]  # fmt: skip
    path = tmp_path / "view.html"
    write_viewer(made, path)
    seen = "[...document.querySelectorAll('#list li:not([hidden]) .about')].map((row) => row.title).join(' ')"

    def choosing(name, value, event="change"):
        return (
            f"(() => {{ const e = document.getElementById('{name}'); e.value = '{value}';"
            f" e.dispatchEvent(new Event('{event}')); return {seen}; }})()"
        )

    everything, odd, odd_and_failed, by_version, by_word, count = in_browser(
        path, seen, choosing("task", "suite/t1"), choosing("outcome", "failure"),
        choosing("task", "") + "; " + choosing("outcome", "") + "; " + choosing("version", "3"),
        choosing("version", "") + "; " + choosing("search", "WORD7 t1", "input"),
        choosing("search", "", "input") + "; document.getElementById('count').textContent",
    )  # fmt: skip
    assert everything == "e0 e1 e2 e3 e4 e5 e6 e7 e8 e9"
    assert odd == "e1 e3 e5 e7 e9"
    assert odd_and_failed == "e1"
    assert by_version == "e3"
    assert by_word == "e7"
    assert count == "10 of 10 episodes · 25.0 % of 8 solved"  # two environment failures are in no rate


@needs_browser
def test_keys_walk_through_episodes_and_turns_and_the_address_follows(tmp_path):
    path = tmp_path / "view.html"
    write_viewer([episode(turn(), turn(), episode_id=f"e/{i}") for i in range(3)], path)
    here = "location.hash"
    j, k, right, left = ({"key": key} for key in ("j", "k", "ArrowRight", "ArrowLeft"))
    down = {"key": "ArrowDown"}
    answers = in_browser(
        path, here, j, here, down, down, here, right, right, right, here, left, here, k, here,
        "location.hash = '#e%2F2/2'; 1", "document.querySelector('.chosen') ? document.querySelector('.chosen').dataset"
        ".turn + document.querySelector('[aria-current] .about').title : 'wait'",
    )  # fmt: skip
    assert answers[:6] == ["#e%2F0", "#e%2F1", "#e%2F2", "#e%2F2/2", "#e%2F2/1", "#e%2F1"]
    assert answers[-1] == "1e/2"


@needs_browser
def test_tokens_show_their_texts_and_probabilities_and_the_prompt_is_behind_a_fold(tmp_path):
    texts = {1: "You", 2: "<pad>", 3: "\n", 5: "click", 6: "<end>"}
    path = tmp_path / "view.html"
    made = episode(turn(log_probs=[-0.6931472, 0.0], versions=[4, 5]))
    write_viewer([made], path, texts=lambda ids: [texts[token] for token in ids])
    words, chance, doubt, prompt = in_browser(
        path, {"key": "j", "text": "j"}, "[...document.querySelectorAll('.token')].map((t) => t.textContent)",
        "document.querySelector('.token').title",
        "[...document.querySelectorAll('.token')].map((t) => t.style.getPropertyValue('--d'))",
        "(document.querySelector('.turn details').open = true,"
        " document.querySelector('.prompt')?.textContent ?? 'wait')",
    )  # fmt: skip
    assert words == ["click", "<end>"]
    assert chance == "token 1 of 2: probability 0.500, log -0.693, version 4"
    assert doubt == ["0.375", "0.000"]
    assert prompt == "You<pad> ×3 ⏎\n"


@needs_browser
def test_hostile_text_is_shown_as_text_and_harms_nobody(tmp_path):
    path = tmp_path / "view.html"
    made = episode(
        turn(text=HOSTILE, action={"kind": "type", "text": HOSTILE}), turn(unreadable=HOSTILE, text=HOSTILE),
        episode_id=HOSTILE, reason=HOSTILE, detail={"said": HOSTILE}, codec=HOSTILE, outcome=Outcome.FAILURE,
        task={"task": HOSTILE, "seed": HOSTILE, "instruction": HOSTILE, "params": {"x": HOSTILE}},
    )  # fmt: skip
    write_viewer([made], path, title=HOSTILE, texts=lambda ids: [HOSTILE] * len(ids))
    answers = in_browser(
        path, {"key": "j", "text": "j"},
        "document.querySelector('.turn details').open = true, window.harmed ?? 'unharmed'",
        "document.querySelector('h2').textContent", "document.querySelectorAll('img:not([data-place])').length",
        "document.querySelector('.wrong').textContent", "window.harmed ?? 'unharmed'",
    )  # fmt: skip
    assert answers == ["unharmed", HOSTILE, 0, f"Could not be read: {HOSTILE}", "unharmed"]


@needs_browser
def test_a_picture_that_is_missing_or_no_picture_is_said_in_words(tmp_path):
    junk = hashlib.sha256(b"junk").hexdigest()
    path = tmp_path / "view.html"
    made = episode(turn(pictures=("0" * 64,)), turn(pictures=(junk,)), pictures={junk: b"junk"})
    write_viewer([made, episode(turns=(), episode_id="none")], path)
    lost, empty = in_browser(
        path,
        "(() => { const found = [...document.querySelectorAll('.lost')].map((l) => l.textContent);"
        " return found.length < 2 ? 'wait' : found; })()",
        "location.hash = '#none'; document.querySelector('.empty')?.textContent ?? 'wait'",
    )  # fmt: skip
    assert lost == ["This picture was not kept.", "This picture cannot be shown."]
    assert empty == "This episode has no turns."


EPISODES = "[...document.querySelectorAll('#list li:not([hidden]) .about')].map((row) => row.title)"


@needs_browser
def test_it_opens_on_the_first_episode_that_was_not_solved_and_not_on_a_broken_session(tmp_path):
    path = tmp_path / "view.html"
    outcomes = (Outcome.SUCCESS, Outcome.ENVIRONMENT_FAILED, Outcome.TRUNCATED, Outcome.FAILURE)
    write_viewer([episode(episode_id=f"e{i}", outcome=outcome) for i, outcome in enumerate(outcomes)], path)
    assert in_browser(path, "location.hash") == ["#e2"]
    write_viewer([episode(episode_id="a"), episode(episode_id="b")], path)
    assert in_browser(path, "location.hash") == ["#a"]
    write_viewer([], path)
    assert in_browser(path, "document.querySelector('.empty').textContent") == ["There are no episodes here."]


@needs_browser
def test_of_two_policies_it_opens_on_the_first_episode_that_only_the_first_one_solved(tmp_path):
    path, task = tmp_path / "view.html", dict(episode().task)
    solved, failed = Outcome.SUCCESS, Outcome.FAILURE
    outcomes = {
        "after": [solved, failed, solved, solved],
        "before": [solved, failed, Outcome.ENVIRONMENT_FAILED, failed],
    }

    def played(number):
        return [
            ViewedEpisode(episode(episode_id=f"e{seed}", outcome=outcome, group="", task=task | {"seed": seed}), label)
            for label, listed in outcomes.items()
            for seed, outcome in enumerate(listed[:number])
        ]

    write_viewer(played(4), path)
    assert in_browser(path, "location.hash") == ["#after%3Ae3"]
    write_viewer(played(3), path)
    assert in_browser(path, "location.hash") == ["#after%3Ae1"]


@needs_browser
def test_a_link_names_a_task_a_policy_and_what_was_not_solved(tmp_path):
    path, task = tmp_path / "view.html", dict(episode().task)
    played = [
        ViewedEpisode(episode(episode_id=name, outcome=Outcome(outcome), task=task | {"task": kind}), label)
        for label in ("after", "before & B")
        for name, outcome, kind in (
            ("x", Outcome.SUCCESS, "a/b"),
            ("y", Outcome.FAILURE, "a/b"),
            ("z", Outcome.FAILURE, "c"),
        )
    ]
    write_viewer(played, path)
    link = viewer_link(path.name, task="a/b", label="before & B", unsolved=True)
    assert link == "view.html#?task=a%2Fb&label=before%20%26%20B&outcome=unsolved"
    settled = "location.hash.startsWith('#?') ? 'wait' : "
    _, shown, here, _, other, _, all_of_them = in_browser(
        path, f"location.hash = {link.partition('#')[2]!r}; 1", settled + EPISODES, "location.hash",
        f"location.hash = {viewer_link('', key='after:z')!r}; 1",
        r"/^after · 1 step · c .*· seed \d+$/"
        ".test(document.querySelector('[aria-current] .about').textContent) ? 1 : 'wait'",
        "location.hash = '?task=gone'; 1", f"{settled}{EPISODES}.length",
    )  # fmt: skip
    assert shown == ["y"]
    assert here == "#before%20%26%20B%3Ay"
    assert (other, all_of_them) == (1, 6)


@needs_browser
def test_a_turn_shows_the_advantage_and_the_value_that_training_recorded(tmp_path):
    path = tmp_path / "view.html"
    credit = EpisodeCredit("e1", 5, (-1.25, None), (0.5, 0.75))
    write_viewer([ViewedEpisode(episode(turn(), turn()), credit=credit)], path)
    shown, fact = in_browser(
        path, "[...document.querySelectorAll('.turn .top')].map((top) => top.textContent)",
        "document.querySelector('.facts').textContent",
    )  # fmt: skip
    assert "advantage −1.25value 0.5" in shown[0]
    assert "advantage" not in shown[1]
    assert "value 0.75" in shown[1]
    assert "learned from in the update to version5" in fact


@needs_browser
def test_the_episodes_of_a_group_are_shown_side_by_side(tmp_path):
    path = tmp_path / "view.html"
    group = [
        ViewedEpisode(
            episode(
                *[turn()] * (i + 1), episode_id=f"e{i}", group="g1", outcome=(Outcome.FAILURE, Outcome.SUCCESS)[i % 2]
            ),
            credit=EpisodeCredit(f"e{i}", 1, (i - 1.0,) * (i + 1), (None,) * (i + 1)),
        )
        for i, outcome in enumerate((Outcome.FAILURE, Outcome.SUCCESS, Outcome.FAILURE))
    ]
    write_viewer([*group, episode(episode_id="alone", group="g2")], path)
    c = {"key": "c", "text": "c"}
    chips, columns, heads, here, back, alone = in_browser(
        path, "document.querySelector('.siblings .label').textContent", c,
        "[...document.querySelectorAll('.column')].map((column) => column.querySelectorAll('figure').length)",
        "[...document.querySelectorAll('.columnhead .credit')].map((each) => each.textContent)", "location.hash", c,
        "location.hash", "location.hash = '#alone'; document.querySelector('.siblings') ? 'wait' : 'alone'",
    )  # fmt: skip
    assert chips == "Played 3 times from the same first screen, 1 solved:"
    assert columns == [1, 2, 3]
    assert heads == ["advantage −1", "advantage +0", "advantage +1"]
    assert (here, back, alone) == ("#e0/compare", "#e0", "alone")
