"""The check of plans that needs no parser: it finds what is not closed, and nothing else."""

import re
from pathlib import Path

import pytest

from palaestra.runs.runners.spade_bdi import PLANS
from palaestra.runs.runners.spade_bdi_checks import SyntaxFault, find_syntax_fault

PAGE = Path(__file__).parents[3] / "docs" / "bdi.md"
SHIPPED = sorted(PLANS.glob("*.asl"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_plans_that_ship_have_no_fault(path):
    assert find_syntax_fault(path.read_text()) is None


def test_the_plans_in_the_documentation_have_no_fault():
    blocks = [block for block in re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL) if "<-" in block]

    assert len(SHIPPED) == 5
    assert blocks
    assert [find_syntax_fault(block) for block in blocks] == [None] * len(blocks)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "// only a comment",
        'say("a full stop. and a bracket ( and // no comment and \\" a quote").\n',
        "half(0.5). list([1, 2|T]) :- more(T).\n",
        '/* a comment\n with ( and " \n*/ !live. # another ( comment\n+!live <- .print(1).\n',
        "// a path: /* \n!live.\n",
        "+!take(T) : T =.. [F, A, B] <- .print(F); ?at(X, _); -+mode(X); !!later.\n",
        '{ include("other.asl") }\n!live.\n{ begin space(x) }\n+!live <- true.\n{ end }\n',
        "!live.+!live<-true.",
    ],
)
def test_text_that_the_parser_takes_has_no_fault(text):
    assert find_syntax_fault(text) is None


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        (
            "!live.\n+!live <- .do(1).\n\n+!swim : at(X <- .do(2).\n",
            4,
            "( is not closed before the full stop in line 4",
        ),
        (
            "!live.\n+!live <- while (not over) {\n  !act;\n  .do(1).\n",
            2,
            "{ is not closed before the full stop in line 4",
        ),
        ("!live.\n+!live <- .use_only(go, [1, 2).\n", 2, "[ is not closed before ) in line 2"),
        ("!live.\n+!live <- !act }.\n", 2, "} closes no bracket"),
        ('!live.\n+!live <- .print("open).\n', 2, "the text that begins with a quotation mark has no end in this line"),
        ("!live.\n/* from here on\n+!live <- true.\n", 2, "the comment that begins with /* has no end"),
        ("!live.\n+!live <- .do(1);\n  .do(2)\n", 2, "the statement that begins here has no full stop at its end"),
        ("!live.\nknown(1)\n", 2, "the statement that begins here has no full stop at its end"),
        (
            "!live.\n@a\n+!live <- .do(1)\n@b\n+!act <- true.\n",
            5,
            "a second <- in the statement that begins in line 2: a full stop is missing",
        ),
    ],
)
def test_a_fault_has_its_line(text, line, reason):
    assert find_syntax_fault(text) == SyntaxFault(line, reason)
