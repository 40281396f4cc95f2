"""Families of synthetic pages other than forms: each draws a page and returns the goals in the state it shows."""

from __future__ import annotations

import html
from collections.abc import Callable
from functools import partial

from palaestra.policy.screen_reader.pages.elements import (
    Goal,
    PageDraft,
    add_button,
    add_field,
    add_paragraph,
    add_text,
    draw_captions,
    draw_distinct,
    draw_margin,
)
from palaestra.policy.screen_reader.pages.words import (
    UI_WORDS,
    pseudo_word,
    random_code,
    random_label,
    random_sentence,
    random_value,
    random_word,
)

COLOURS = "red green blue yellow orange purple cyan magenta pink black gray white brown lime".split()
ORDINALS = ("1st", "2nd", "3rd", "4th", "5th")


def draw_buttons_and_links(draft: PageDraft) -> list[Goal]:
    """Buttons, links, text and a field in random order."""
    rng = draft.rng
    captions = draw_captions(rng, rng.randint(1, 4))
    goals: list[Goal] = []
    additions: list[Callable[[], object]] = []
    links: list[tuple[str, str]] = []

    def add_button_and_goal(word: str) -> None:
        key = add_button(draft, word, inline=rng.random() < 0.3)
        forms = (
            f'Click on the "{word}" button.',
            f"Click button {word}.",
            f'Press "{word}".',
            f"Click the {word} button.",
        )
        goals.append(Goal(rng.choice(forms), key))

    additions += [partial(add_button_and_goal, word) for word in captions]
    additions += [lambda: add_text(draft, random_sentence(rng, 1, 4)) for _ in range(rng.randint(0, 2))]
    if rng.random() < 0.5:
        additions.append(lambda: links.extend(add_paragraph(draft, rng.randint(1, 4))))
    if rng.random() < 0.4:
        additions.append(lambda: add_field(draft))
    rng.shuffle(additions)
    for add in additions:
        add()
    for word, key in links:
        if _is_unique(word, links):
            forms = (f'Click on the link "{word}".', f'Follow the link "{word}".', f"Click {word}.")
            goals.append(Goal(rng.choice(forms), key))
    return goals


def _is_unique(word: str, links: list[tuple[str, str]]) -> bool:
    return sum(other == word for other, _ in links) == 1


def draw_hidden_link(draft: PageDraft) -> list[Goal]:
    """Tabs or sections, of which one is open: click the link, or look elsewhere."""
    rng = draft.rng
    has_tabs = rng.random() < 0.5
    count = rng.randint(2, 5)
    open_index = rng.randrange(-1, count) if not has_tabs else rng.randrange(count)
    names = ("Tab", "Tab", "Page", "Part") if has_tabs else ("Section", "Section", "Part", "Topic")
    name = rng.choice(names)
    colour = rng.choice(("#007fff", "#007fff", "#ddd", "#eee"))
    if has_tabs:
        # At most three tabs fit; if the open one is not among them, none is highlighted.
        count = min(count, 3)
        keys, links = _add_tabs(draft, name, count, open_index, colour)
        open_index = min(open_index, count - 1)
    else:
        keys, links = _add_sections(draft, name, count, open_index, colour)
    if links and rng.random() < 0.55:
        word, key = rng.choice(links)
        if not _is_unique(word, links):
            return []
    else:
        word = pseudo_word(rng)
        if any(other == word for other, _ in links):
            return []
        key = keys[(open_index + 1) % len(keys)]
    search = "Switch between the tabs to find" if has_tabs else "Expand the sections below, to find"
    forms = (f'{search} and click on the link "{word}".', f'Find and click on the link "{word}".')
    goal = Goal(rng.choice(forms), key)
    number = rng.randrange(len(keys))
    if rng.random() < 0.4 and number != open_index:
        goal = Goal(rng.choice((f"Click on {name} #{number + 1}.", f"Open {name} #{number + 1}.")), keys[number])
    return [goal]


def _add_tabs(
    draft: PageDraft, name: str, count: int, open_index: int, colour: str
) -> tuple[list[str], list[tuple[str, str]]]:
    """Add tabs and the text of the open one; returns the ids of the tabs, and the links."""
    rng, keys, cells = draft.rng, [], []
    for place in range(count):
        keys.append(draft.new_id())
        look = (
            f"background:{colour};color:{'#fff' if colour == '#007fff' else '#222'}"
            if place == open_index
            else "background:#f6f6f6;color:#454545"
        )
        cells.append(
            f"<span id={keys[-1]} style='display:inline-block;border:1px solid #c5c5c5;padding:4px 5px;"
            f"margin-right:2px;{look}'>{name} #{place + 1}</span>"
        )
    draft.add(
        f"<div style='background:#e9e9e9;padding:3px;font-size:{rng.choice((9, 10, 11))}px'>{''.join(cells)}</div>"
    )
    return keys, add_paragraph(draft, rng.randint(1, 4))


def _add_sections(
    draft: PageDraft, name: str, count: int, open_index: int, colour: str
) -> tuple[list[str], list[tuple[str, str]]]:
    """Add headings and the text below the open one; returns the ids of the headings, and the links."""
    keys: list[str] = []
    links: list[tuple[str, str]] = []
    for place in range(count):
        keys.append(draft.new_id())
        draft.add(
            f"<div id={keys[-1]} style='background:{colour};color:{'#fff' if colour == '#007fff' else '#222'};"
            f"border:1px solid #003eff;border-radius:3px;padding:1px 2px;margin:2px 0'>{name} #{place + 1}</div>"
        )
        if place == open_index:
            links = add_paragraph(draft, draft.rng.randint(1, 3))
    return keys, links


def draw_choices(draft: PageDraft) -> list[Goal]:
    """Check boxes or radio buttons, and a button."""
    rng = draft.rng
    is_radio = rng.random() < 0.4
    words = draw_captions(rng, rng.randint(2, 6))
    wanted = rng.sample(words, 1 if is_radio else rng.randint(0, min(4, len(words))))
    wanted = [word for word in words if word in wanted] if rng.random() < 0.5 else wanted
    checked_count = len(wanted) if rng.random() < 0.35 else rng.randrange(len(wanted) + 1)
    checked = set(wanted[:checked_count])
    boxes = {}
    shape, gap = "radio" if is_radio else "checkbox", rng.choice((0, 1, 2, 4))
    for word in words:
        key = draft.new_id()
        mark = " checked" if word in checked else ""
        boxes[word] = key
        draft.add(
            f"<div style='margin-top:{gap}px'><input type={shape} name=r id={key}{mark}>{html.escape(word)}</div>"
        )
    caption = rng.choice(("Submit", "Submit", "Submit", *rng.sample(UI_WORDS, 2)))
    button = add_button(draft, caption)
    names = ", ".join(wanted) if wanted else "nothing"
    verb = rng.choice(("Select", "Select", "Choose", "Check"))
    text = f"{verb} {names} and click {caption}."
    if len(wanted) < 2 and rng.random() < 0.3:
        text = f'{verb} "{names}" and press {caption}.'
    unchecked = [word for word in wanted if word not in checked]
    return [Goal(text, boxes[unchecked[0]] if unchecked else button)]


def draw_dialog(draft: PageDraft) -> list[Goal]:
    """A dialog box with a cross and up to three buttons."""
    rng = draft.rng
    close, title = draft.new_id(), rng.choice(("", pseudo_word(rng).capitalize(), "Message"))
    captions = draw_distinct(rng, rng.randint(0, 3), lambda r: r.choice([*UI_WORDS, random_word(r)]))
    keys, cells = [], []
    for word in captions:
        keys.append(draft.new_id())
        cells.append(
            f"<button id={keys[-1]} style='font-size:10px;padding:3px 8px;background:#f6f6f6;"
            f"border:1px solid #c5c5c5;border-radius:3px;margin:2px'>{html.escape(word)}</button>"
        )
    left, top = rng.randint(0, 30), rng.randint(0, 40)
    draft.add(
        f"<div style='position:relative;left:{left}px;top:{top}px;width:{rng.randint(100, 125)}px;"
        f"border:1px solid #c5c5c5;border-radius:3px;padding:2px;font-size:10px'>"
        f"<div style='background:#e9e9e9;border:1px solid #ddd;height:18px;padding:2px'>{title}"
        f"<button id={close} style='float:right;width:18px;height:17px;padding:0;"
        f"font-size:11px;color:#777;background:#f6f6f6;border:1px solid #c5c5c5;border-radius:3px'>✖</button></div>"
        f"<div style='padding:8px;color:#333'>{random_sentence(rng)}</div>"
        f"<div style='text-align:right'>{''.join(cells)}</div></div>"
    )
    forms = (
        'Click the button in the dialog box labeled "x".',
        'Close the dialog box by clicking the "x".',
        "Close the dialog box.",
    )
    goals = [Goal(rng.choice(forms), close)]
    for word, key in zip(captions, keys, strict=True):
        forms = (
            f'Click the button in the dialog box labeled "{word}".',
            f'Press "{word}".',
            f"Click {word} in the dialog box.",
        )
        goals.append(Goal(rng.choice(forms), key))
    return goals


def draw_widget_kinds(draft: PageDraft) -> list[Goal]:
    """Widgets that are asked for by their kind or order."""
    rng = draft.rng
    kinds = [rng.choice(("text", "textarea", "radio", "checkbox", "button")) for _ in range(rng.randint(2, 5))]
    keys: dict[str, list[str]] = {}
    for kind in kinds:
        keys.setdefault(kind, []).append(_add_widget(draft, kind))
    fields = keys.get("text", [])
    kind = rng.choice(list(keys))
    goals = [Goal(rng.choice((f'Click on a "{kind}" widget.', f"Click a {kind} widget.")), rng.choice(keys[kind]))]
    if len(keys[kind]) > 1:
        goals = []
    if len(fields) > 1 or (fields and rng.random() < 0.3):
        place = rng.randrange(len(fields))
        forms = (f"Focus into the {ORDINALS[place]} input textbox.", f"Click the {ORDINALS[place]} text field.")
        goals.append(Goal(rng.choice(forms), fields[place]))
    return goals


def _add_widget(draft: PageDraft, kind: str) -> str:
    """Add a widget with random content; returns its id."""
    rng = draft.rng
    if kind == "text":
        return add_field(draft, rng.choice(("", random_code(rng))))
    if kind == "button":
        return add_button(draft, random_word(rng))
    key = draft.new_id()
    if kind == "textarea":
        draft.add(
            f"<textarea id={key} style='{draw_margin(rng)}width:{rng.choice((90, 120))}px;height:26px;display:block'>"
            f"{random_code(rng)}</textarea>"
        )
    else:
        mark = rng.choice(("", "", " checked"))
        draft.add(f"<div style='{draw_margin(rng)}'><input type={kind} id={key}{mark}>{random_code(rng)}</div>")
    return key


def draw_ordered_fields(draft: PageDraft) -> list[Goal]:
    """Empty fields that are asked for by their order."""
    rng = draft.rng
    count = rng.randint(1, 4)
    keys = [add_field(draft, width_px=rng.choice((100, 120))) for _ in range(count)]
    place = rng.randrange(count)
    text = f"Focus into the {ORDINALS[place]} input textbox." if count > 1 else "Focus into the textbox."
    return [Goal(text, keys[place])]


def draw_coloured_boxes(draft: PageDraft) -> list[Goal]:
    """Squares that are asked for by their colour."""
    rng = draft.rng
    colours = rng.sample(COLOURS, rng.randint(2, 5))
    keys = []
    side = rng.randint(18, 52)
    for colour in colours:
        keys.append(draft.new_id())
        draft.add(
            f"<span id={keys[-1]} data-box={colour} style='display:inline-block;width:{side}px;height:{side}px;"
            f"background:{colour};border:1px solid #000;margin:{rng.randint(1, 6)}px'></span>"
        )
    place = rng.randrange(len(colours))
    forms = (f"Click on the {colours[place]} colored box.", f"Click the {colours[place]} box.")
    return [Goal(rng.choice(forms), keys[place])]


def draw_typing_and_keys(draft: PageDraft) -> list[Goal]:
    """Keys, scrolling, and typing without a form."""
    rng = draft.rng
    value = random_value(rng)
    add_field(draft, focused=True)
    for _ in range(rng.randint(0, 5)):
        add_text(draft, random_sentence(rng, 2, 6))
    key = rng.choice(("Enter", "Tab", "Escape", "Backspace"))
    goals = (
        Goal(f'Type "{value}".', text=value),
        Goal(f"Press the {key} key.", keys=(key,)),
        Goal(rng.choice(("Scroll down.", "Scroll down the page.")), scroll=rng.choice((50, 100, 200))),
    )
    return [rng.choice(goals)]


def draw_dense_text(draft: PageDraft) -> list[Goal]:
    """As much text as fits, of all sizes and colours: for the vision tower only."""
    rng = draft.rng
    for _ in range(14):
        words = [rng.choice((random_word, random_value, random_label))(rng) for _ in range(rng.randint(1, 6))]
        colour = rng.choice(("#000", "#000", "#333", "#00e", "#666", "#c00", "#060"))
        back = rng.choice(("", "", "", "background:#eee;", "background:yellow;", "background:#e0e8ff;"))
        if rng.random() < 0.12:
            colour, back = "#fff", f"background:{rng.choice(('#007fff', '#333', '#080', '#a00'))};"
        look = rng.choice(("", "", "", "font-weight:bold;", "text-decoration:underline;"))
        size = rng.choice((9, 10, 10, 10, 10, 11, 12, 12, 13, 13.333, 14, 14, 16))
        indent = rng.choice((0, 0, 1, 3.5, 7.25))
        draft.add(
            f"<div style='font-size:{size}px;color:{colour};{back}{look}padding-left:{indent}px'>"
            f"{html.escape(rng.choice((' ', ' ', ', ')).join(words))}</div>"
        )
    return []
