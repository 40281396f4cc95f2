import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.studio.model.commands import Command, Commands, match_score


def _commands(*titles, group="Play"):
    commands = Commands()
    for title in titles:
        commands.add(Command(f"x.{title}", title, group, lambda: None))
    return commands


def _titles(commands, text, **options):
    return [command.title for command in commands.search(text, **options)]


TITLES = ("Pause or continue", "New episode", "Same episode again", "Faster", "Session panel", "Play", "Find a command")


def test_a_title_that_begins_with_what_was_typed_comes_first():
    commands = _commands(*TITLES)

    assert _titles(commands, "pa")[0] == "Pause or continue"
    assert _titles(commands, "pan")[0] == "Session panel"
    assert _titles(commands, "play")[0] == "Play"
    assert _titles(commands, "new ep")[0] == "New episode"
    assert _titles(commands, "episode")[:2] == ["New episode", "Same episode again"]


@given(data=st.data(), titles=st.lists(st.text("abc ", min_size=1, max_size=12), min_size=1, unique=True))
def test_no_title_comes_before_one_that_begins_with_what_was_typed(data, titles):
    title = data.draw(st.sampled_from(titles))
    typed = data.draw(st.integers(1, len(title)).map(lambda count: title[:count]))
    phrase = " ".join(typed.split())
    commands = _commands(*titles, group="zz")
    found = _titles(commands, typed, limit=99)
    if not phrase:
        assert found == titles
        return

    begins = [one.startswith(phrase) for one in found]

    assert begins == sorted(begins, reverse=True)
    assert sum(begins) == sum(one.startswith(phrase) for one in titles)


@given(pattern=st.text(), text=st.text())
def test_a_text_matches_if_and_only_if_every_character_occurs_in_order(pattern, text):
    wanted = iter(text.lower())
    occurs = all(character in wanted for character in "".join(pattern.lower().split()))

    assert (match_score(pattern, text) is not None) == occurs


@pytest.mark.parametrize(
    ("pattern", "better", "worse"),
    [
        ("cart", "CartPole-v1", "compiled/CartPole-v1"),
        ("pole", "compiled Pole", "CartPole-v1"),
        ("fl", "Frozen Lake", "Wafer plus"),
        ("abc", "xabcx", "a b c"),
        ("ab", "ab", "abc"),
    ],
)
def test_prefixes_starts_of_words_and_short_texts_are_better(pattern, better, worse):
    assert match_score(pattern, better) > match_score(pattern, worse)


def test_letters_that_follow_each_other_count_more_than_letters_apart():
    assert match_score("zabc", "z abc") > match_score("zabc", "z axbxc")


def test_nothing_typed_shows_the_commands_in_their_order_up_to_the_limit():
    assert _titles(_commands(*TITLES), "  ") == list(TITLES)
    assert _titles(_commands(*TITLES), "", limit=2) == list(TITLES[:2])


def test_a_command_is_found_by_its_group():
    commands = _commands("Pause", group="Play")

    assert _titles(commands, "play pause") == ["Pause"]
    assert _titles(commands, "zzz") == []


def test_a_command_that_is_not_possible_now_is_not_offered():
    commands = Commands()
    commands.add(Command("a", "Pause", "Play", lambda: None, "Space", lambda: False))

    assert commands.search("pause") == []
    assert commands.get("a").title == "Pause"


def test_two_commands_cannot_share_a_name_or_a_shortcut():
    commands = Commands()
    commands.add(Command("a", "A", "X", lambda: None, "Ctrl+A"), Command("b", "B", "X", lambda: None))
    commands.add(Command("c", "C", "X", lambda: None))
    for name, shortcut in (("a", ""), ("d", "Ctrl+A")):
        with pytest.raises(ValueError, match=r"exists already$"):
            commands.add(Command(name, "D", "X", lambda: None, shortcut))

    assert [command.name for command in commands] == ["a", "b", "c"]


def test_the_overlay_lists_commands_with_a_shortcut_by_group():
    commands = Commands()
    commands.add(
        Command("a", "A", "One", lambda: None, "Ctrl+A"),
        Command("b", "B", "Two", lambda: None, "Ctrl+B"),
        Command("c", "C", "One", lambda: None, "Ctrl+C"),
        Command("d", "D", "One", lambda: None),
    )

    groups = {group: [command.name for command in some] for group, some in commands.groups().items()}

    assert groups == {"One": ["a", "c"], "Two": ["b"]}
