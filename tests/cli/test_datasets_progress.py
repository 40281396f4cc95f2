"""Progress of `palaestra datasets`: plain lines where nothing can be drawn again."""

from palaestra.cli.datasets.progress import show_progress


def test_without_a_terminal_there_is_one_line_every_ten_seconds(capsys):
    now = 0.0
    with show_progress("downloading a-v0", "bytes", lambda: now) as update:
        for now in (0.0, 9.9, 10.0, 19.9, 20.1):
            update(int(now * 1e6), 40_000_000)
        now = 31.0
        update(31_000_000, 0)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "downloading a-v0: 10.0 MB of 40.0 MB",
        "downloading a-v0: 20.1 MB of 40.0 MB",
        "downloading a-v0: 31.0 MB",
    ]


def test_what_is_not_bytes_is_counted(capsys):
    now = 0.0
    with show_progress("collecting", "steps", lambda: now) as update:
        now = 12.0
        update(1500, 20_000)
    assert capsys.readouterr().err == "collecting: 1,500 of 20,000 steps\n"
