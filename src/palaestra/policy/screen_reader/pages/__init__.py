"""Synthetic pages for the training of the reading model: HTML, and goals to pursue on them."""

from palaestra.policy.screen_reader.pages.elements import Goal
from palaestra.policy.screen_reader.pages.synthetic_page import SyntheticPage, draw_page

__all__ = ["Goal", "SyntheticPage", "draw_page"]
