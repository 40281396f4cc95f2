"""The first page: from nothing to trained agents that play, in a few clicks."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QFrame, QPushButton

from palaestra.runs.phase import Phase
from palaestra.runs.record import RunRecord
from palaestra.studio.qt.parts import Badge, column, frame, label, push_button, row
from palaestra.studio.qt.theme import Theme
from palaestra.studio.qt.view import View
from palaestra.studio.studio import Studio


class WelcomePage(View):
    """Play it yourself, train an agent, watch it; then see what an agent has learned."""

    def __init__(self, studio: Studio, theme: Theme) -> None:
        steps = studio.first_steps
        super().__init__(studio, theme, [steps, studio.browser.runs])
        title = label("Welcome to Palaestra", "number")
        text = label(
            "Play an environment yourself, train an agent in it, and watch the agent play. "
            "Everything below takes less than two minutes.",
            "muted",
            wrap=True,
        )
        self._cards = [
            self._card("1", "Play CartPole yourself", "Keep the pole upright with the arrow keys.", "Play", steps.play),
            self._card("2", "Train an agent", "PPO learns it in about ten seconds on one core.", "Train", steps.train),
            self._card("3", "Watch it play", "Load the trained policy into the play.", "Watch", steps.watch),
            self._card(
                "4",
                "See what an agent knows",
                "Q-learning crosses a frozen lake after seconds; arrows show its choice in every cell.",
                "Train and watch",
                steps.train_lake,
            ),
        ]
        cards = column(*(card for card, _, _ in self._cards), spacing=12)
        skip = push_button("Skip", steps.dismiss, role="link")
        inner = column(title, text, 12, cards, 8, row(skip, None), spacing=8)
        self.setLayout(column(None, row(None, inner, None), None, margins=(40, 20, 40, 20)))

    def _card(
        self, number: str, title: str, text: str, action: str, perform: Callable[[], None]
    ) -> tuple[QFrame, Badge, QPushButton]:
        badge = Badge(self.theme, "to do", "muted")
        button = push_button(action, perform, role="primary")
        count = label(number, "number")
        count.setMinimumWidth(28)
        count.setAlignment(Qt.AlignmentFlag.AlignTop)
        body = column(label(title, "heading"), label(text, "muted"), spacing=3)
        card = frame(row(count, body, None, badge, button, spacing=14, margins=(16, 14, 16, 14)), "card")
        card.setMinimumWidth(560)
        return card, badge, button

    def refresh(self) -> None:
        """Show which steps are done."""
        steps = self.studio.first_steps
        states = [
            ("done", "success") if steps.has_played else ("to do", "muted"),
            _run_state(steps.run),
            ("done", "success") if steps.has_watched else ("to do", "muted"),
            _run_state(steps.lake_run),
        ]
        for (_, badge, _), (text, tone) in zip(self._cards, states, strict=True):
            badge.set(text, tone)
        for index, run in ((1, steps.run), (3, steps.lake_run)):
            self._cards[index][2].setEnabled(run is None or run.phase.has_ended)
        self._cards[2][2].setEnabled(steps.can_watch)


def _run_state(run: RunRecord | None) -> tuple[str, str]:
    if run is None:
        return "to do", "muted"
    if run.phase is Phase.SUCCEEDED:
        return "done", "success"
    share = f"{100 * run.env_step / run.total_steps:.0f} %" if run.total_steps else run.phase.value
    return run.phase.value if run.phase.has_ended else share, "info"
