"""Plays: one running environment that a person, an agent or both control, and the recorded episodes."""
