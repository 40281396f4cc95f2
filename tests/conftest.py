"""What holds for every test: default signals for the processes it starts, and a time limit that fits its kind."""

import signal

import pytest

SLOW_TEST_TIMEOUT_S = 3600


def pytest_configure():
    """Handle SIGINT even when this process inherited it as ignored or blocked.

    A background job of a non-interactive shell ignores SIGINT, and so does every process it starts. A test that
    interrupts a process of its own would then wait for ever.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # Started with nohup.
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """Unblock the signals that a test left blocked; the processes of all later tests would not see them."""
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if blocked:
        item.warn(pytest.PytestWarning(f"left signals blocked: {sorted(map(int, blocked))}"))


def pytest_collection_modifyitems(items):
    """Give tests that take minutes a limit of their own; `timeout` in pyproject.toml is for the fast ones."""
    for item in items:
        is_slow = any(item.get_closest_marker(name) for name in ("slow", "kubernetes", "vllm"))
        if is_slow and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TEST_TIMEOUT_S))
