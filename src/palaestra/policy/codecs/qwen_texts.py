"""Fixed texts of the Qwen family's prompts and replies, which the tokenizers of the built-in models have as tokens."""

from __future__ import annotations

from collections.abc import Iterable

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
REQUEST = (
    "Please generate the next move according to the UI screenshot, instruction and previous actions.\n\n"
    "Instruction: {instruction}\n\nPrevious actions:\n{previous}"
)
"""The text beside the first screenshot, from the cookbook of Qwen3-VL."""
COORDINATES = 1000
"""Coordinates are from 0 to 999 across any image."""
CALL = '<tool_call>\n{"name": "computer_use", "arguments": {"action": "'
"""The beginning of a reply, up to the name of the action."""
POINTER_ACTIONS = "left_click right_click middle_click double_click triple_click mouse_move left_click_drag".split()


def add_folded_calls(phrases: Iterable[str]) -> list[str]:
    """The phrases, and calls as they appear in the list of previous actions, where newlines have become spaces."""
    phrases = list(phrases)
    folded = [phrase.replace("\n", " ") for phrase in phrases if "tool_call" in phrase]
    return list(dict.fromkeys([*phrases, *folded]))
