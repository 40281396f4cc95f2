"""UI sessions: actions on screens, tasks, and the browsers or pods that run them. Never imports torch."""
