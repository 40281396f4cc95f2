"""The report says in plain HTML what the evaluation found, and nothing in it can run or call out."""

import re
from html.parser import HTMLParser

from tests.evaluation.test_screens import E, F, S, compared, played

from palaestra.evaluation.report import comparison_page, evaluation_page, write_page
from palaestra.evaluation.screens import ScreenEvaluation

HOSTILE = "</title></script><img src=x onerror=alert(1)>"


class _Seen(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


def seen(page):
    found = _Seen()
    found.feed(page)
    return {tag for tag, _ in found.tags}, found.tags, re.sub(r"\s+", " ", " ".join(found.text))


def test_the_numbers_are_readable_without_any_script():
    found = ScreenEvaluation.from_episodes(
        [played("a/x", seed, outcome) for seed, outcome in enumerate([S, S, F, S, E])]
    )
    kinds, _, text = seen(evaluation_page(found, "Tiny model"))
    assert "75.0 % of 4 episodes solved" in text
    assert "30.1 % to 95.4 %" in text
    assert "1, in no rate" in text
    assert not kinds & {"script", "img", "link", "iframe", "object"}


def test_nothing_is_loaded_from_anywhere():
    found = ScreenEvaluation.from_episodes([played("a/x", 0, S)])
    page = evaluation_page(found, "Tiny model")
    assert not re.search(r"https?://|url\(|@import|\bsrc=|\bhref=", page)


def test_names_from_outside_are_text_and_nothing_else():
    found = ScreenEvaluation.from_episodes([played(HOSTILE, 0, S), played("a/x", 0, S)])
    for page in (evaluation_page(found, HOSTILE), comparison_page(compared([S], [F]), HOSTILE, a=HOSTILE, b=HOSTILE)):
        kinds, tags, text = seen(page)
        assert "img" not in kinds
        assert not any(name.startswith("on") for _, attributes in tags for name in attributes)
        assert "onerror=alert(1)" in text


def test_a_comparison_says_who_won_by_how_much_and_what_was_left_out():
    page = comparison_page(compared([S] * 9 + [F, E], [F] * 9 + [S]), "Before and after", a="after", b="before")
    _, _, text = seen(page)
    assert "+80.0 points" in text
    assert "p = 0.0215" in text
    assert "10 pairs" in text
    assert "Environment failures: 1 of A, 0 of B" in text


def test_a_comparison_links_the_picture_beside_it_and_says_which_episode_it_shows():
    kinds, tags, text = seen(comparison_page(compared([F, S], [F, F]), "Two", a="a", b="b", picture="before-after.png"))
    assert [attributes["href"] for tag, attributes in tags if tag == "a"] == ["before-after.png"]
    assert "An episode that A solved and B did not, step by step" in text
    assert "img" not in kinds
    assert "The first episode of both" in comparison_page(compared([F], [S]), "Two", a="a", b="b", picture="x.png")
    assert "href" not in comparison_page(compared([S], [F]), "Two", a="a", b="b")


def test_an_evaluation_without_episodes_still_has_a_page():
    assert "No episode can be counted" in evaluation_page(ScreenEvaluation.from_episodes([]), "Nothing")
    assert "has a partner" in comparison_page(compared([], []), "Nothing", a="a", b="b")


def test_repeated_seeds_add_the_chances_of_k_tries():
    found = ScreenEvaluation.from_episodes([played("a/x", 0, outcome) for outcome in (S, F, F, F)])
    _, _, text = seen(evaluation_page(found, "Tiny model"))
    assert "pass@k" in text
    assert "50.0 %" in text  # pass@2 of one right in four


def test_a_page_is_written_whole_even_with_half_characters_in_it(tmp_path):
    path = tmp_path / "deep" / "report.html"
    write_page(evaluation_page(ScreenEvaluation.from_episodes([]), "broken \ud800 text"), path)
    assert "broken ? text" in path.read_text(encoding="utf-8")
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
