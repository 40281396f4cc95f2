"""Every key has a spelling in every family that comes back as the key, or none."""

import string

import pytest

from palaestra.policy.codecs.decoding import DecodeError
from palaestra.policy.codecs.key_names import OPENAI_KEYS, PYAUTOGUI_KEYS, SYNONYMS, XDOTOOL_KEYS
from palaestra.sessions.keys import NAMED

FAMILIES = {"pyautogui": PYAUTOGUI_KEYS, "openai": OPENAI_KEYS, "xdotool": XDOTOOL_KEYS}
CHARACTERS = string.ascii_lowercase + string.ascii_uppercase + string.digits + string.punctuation + "äßñЖ漢"


@pytest.mark.parametrize("names", FAMILIES.values(), ids=FAMILIES)
def test_every_key_comes_back_or_has_no_name(names):
    unnamed = set()
    for key in [*NAMED, *CHARACTERS]:
        spelling = names.spelling(key)
        if spelling is None:
            unnamed.add(key)
        else:
            assert names.key(spelling) == key
    assert unnamed == (set(string.ascii_uppercase) if names is OPENAI_KEYS else set())


@pytest.mark.parametrize("names", FAMILIES.values(), ids=FAMILIES)
def test_no_two_keys_share_a_spelling(names):
    spellings = [names.spelling(key) for key in [*NAMED, *CHARACTERS]]
    said = [spelling for spelling in spellings if spelling is not None]
    assert len(said) == len(set(said))
    assert not any(
        " " in spelling or "+" in spelling for spelling in said if names is not OPENAI_KEYS and spelling != "+"
    )


@pytest.mark.parametrize("names", FAMILIES.values(), ids=FAMILIES)
def test_names_are_read_whatever_their_case_and_their_joints(names):
    for spelling in ("PageDown", "page_down", "PAGE-DOWN", "Page Down", "pgdn"):
        assert names.key(spelling) == "PageDown"
    for spelling in ("Control", "ctrl", "CTRL"):
        assert names.key(spelling) == "Control"
    for spelling in ("cmd", "Super", "win", "META", "command"):
        assert names.key(spelling) == "Meta"
    assert [names.key(spelling) for spelling in (" ", "space", "spacebar")] == ["Space"] * 3


def test_a_synonym_means_one_key_and_is_no_other_keys_name():
    assert set(SYNONYMS.values()) <= set(NAMED)
    assert not {name.lower() for name in NAMED} & set(SYNONYMS)


def test_families_write_their_own_spellings():
    keys = ("Control", "Meta", "PageDown", "Enter", "ArrowLeft", "Escape", "F5", "+", "a")
    assert [PYAUTOGUI_KEYS.spelling(key) for key in keys] == [
        "ctrl", "win", "pagedown", "enter", "left", "esc", "f5", "+", "a",
    ]  # fmt: skip
    assert [XDOTOOL_KEYS.spelling(key) for key in keys] == [
        "ctrl", "super", "Page_Down", "Return", "Left", "Escape", "F5", "plus", "a",
    ]  # fmt: skip
    assert [OPENAI_KEYS.spelling(key) for key in keys] == [
        "CTRL", "SUPER", "PAGEDOWN", "ENTER", "ARROWLEFT", "ESC", "F5", "+", "A",
    ]  # fmt: skip


def test_a_letter_of_openai_is_the_key_and_not_the_capital():
    assert [OPENAI_KEYS.key(letter) for letter in "Aa"] == ["a", "a"]
    assert [PYAUTOGUI_KEYS.key(letter) for letter in "Aa"] == ["A", "a"]


@pytest.mark.parametrize("spelling", ["", "ctrl+c", "kp_enter", "f13", "\n", "\x00", "x" * 100_000])
@pytest.mark.parametrize("names", FAMILIES.values(), ids=FAMILIES)
def test_what_is_in_no_table_is_refused(names, spelling):
    with pytest.raises(DecodeError, match="unknown_key"):
        names.key(spelling)
