"""The report says in plain HTML what the evaluation found, and nothing in it can run or call out."""

import re
from html.parser import HTMLParser

from tests.evaluation.test_screens import E, F, S, compared, played

from palaestra.api.screen_evaluation import format_comparison
from palaestra.evaluation.report import Viewer, comparison_page, evaluation_page, write_page
from palaestra.evaluation.screens import ScreenEvaluation
from palaestra.evaluation.viewer import viewer_link

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
    assert "1 (not part of the rate)" in text
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
    assert "The success rate of A is 80.0 percentage points above that of B" in text
    assert "50.0 percentage points below" in seen(comparison_page(compared([F, S], [S, S]), "", a="a", b="b"))[2]
    assert "A and B have the same success rate" in seen(comparison_page(compared([S], [S]), "", a="a", b="b"))[2]
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


def test_a_chart_draws_the_rate_and_the_interval_of_every_task_before_and_after():
    page = comparison_page(compared([S] * 4, [F] * 4), "Two", a="after", b="before")
    chart = page.split("<div class=chart>")[1].split("class=ticks")[0]
    dots = re.findall(r"<circle class='dot (\w+)' cx=([\d.]+)%", chart)
    ranges = re.findall(r"<line class='range (\w+)' x1=([\d.]+)% x2=([\d.]+)%", chart)
    assert dots == [("other", "0.0"), ("main", "100.0")]
    assert ranges == [("other", "0.0", "48.99"), ("main", "51.01", "100.0")]  # Wilson: 0 and 4 of 4
    assert "0 % → 100 %" in chart
    assert "<span><i class=other></i>B: before</span><span><i class=main></i>A: after</span>" in page


def test_the_first_unsolved_episode_and_every_task_with_failures_link_to_the_viewer():
    found = ScreenEvaluation.from_episodes(
        [played("a/x", 0, S), played("a/x", 1, E), played("a/x", 2, F), played("b&c", 3, F), played("d", 4, S)]
    )
    _, tags, text = seen(evaluation_page(found, "Tiny model", viewer=Viewer("episodes.html")))
    links = [attributes["href"] for tag, attributes in tags if tag == "a"]
    first = found.entries[2].episode_id
    assert links == [
        viewer_link("episodes.html", key=first),
        "episodes.html#?task=a%2Fx&outcome=unsolved",
        "episodes.html#?task=b%26c&outcome=unsolved",
    ]
    assert "First episode that was not solved:" in text
    assert text.count("1 not solved") == 2
    solved = ScreenEvaluation.from_episodes([played("a/x", 0, S)])
    assert "href" not in evaluation_page(solved, "Tiny model", viewer=Viewer("episodes.html"))


def test_episodes_that_are_in_no_pair_are_mentioned_only_if_there_are_any():
    complete, incomplete = compared([S, F], [F, F]), compared([S, F, S], [F, F])
    assert "in the pairs" not in comparison_page(complete, "Two", a="a", b="b")
    assert format_comparison(complete).endswith("; 2 pairs)")
    assert "Without a partner: 1 of A, 0 of B. None of" in comparison_page(incomplete, "Two", a="a", b="b")
    assert format_comparison(incomplete).endswith("; 2 pairs; 1 and 0 unpaired)")


def test_a_difference_that_may_be_chance_is_called_that():
    assert "may be chance" in comparison_page(compared([S, F], [F, F]), "Two", a="a", b="b")
    assert "may be chance" not in comparison_page(compared([S] * 20, [F] * 20), "Two", a="a", b="b")


def test_a_picture_is_shown_inside_the_page_and_nothing_else_may_be_loaded():
    page = comparison_page(compared([S], [F]), "Two", a="a", b="b", picture="x.png", picture_data=b"PNG")
    assert '<img src="data:image/png;base64,UE5H"' in page
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in page


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
