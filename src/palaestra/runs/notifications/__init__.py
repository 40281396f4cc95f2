"""Notifications about runs: what is sent to webhooks, and how it is delivered."""
