"""The desktop: Qt-free models, one feed, Qt views. Never imports torch."""
