from palaestra.runs.tools.wandb import read_tracking
from palaestra.telemetry.event import LogLine
from palaestra.telemetry.journal import Journal


def offline_run(place, name, *, synced=False, mode="offline-"):
    directory = place.path / "wandb" / f"{mode}run-20261116_100000-{name}"
    directory.mkdir(parents=True)
    (directory / f"run-{name}.wandb").write_bytes(b":W&B")
    if synced:
        (directory / f"run-{name}.wandb.synced").touch()
    return directory


def place(home):
    run = home.run("run one")
    attempt = run.attempt(1)
    attempt.work.mkdir(parents=True)
    return run, attempt


def test_a_run_that_is_not_tracked_is_off(home):
    assert read_tracking(place(home)[0]).state == "off"


def test_an_offline_run_is_uploaded_by_the_command_that_is_told(home):
    run, attempt = place(home)
    directory = offline_run(attempt, "abc")

    found = read_tracking(run)

    assert found.state == "offline"
    assert found.sync_command == f"wandb sync '{directory}'"
    assert found.pending == (str(directory),)
    assert "wandb login" in found.remedy


def test_what_wandb_marked_as_uploaded_is_not_uploaded_again(home):
    run, attempt = place(home)
    offline_run(attempt, "abc", synced=True)
    assert read_tracking(run).state == "uploaded"

    left = offline_run(attempt, "def")
    assert read_tracking(run).pending == (str(left),)


def test_the_address_of_an_online_run_is_read_from_its_output(home):
    run, attempt = place(home)
    text = "wandb: 🚀 View run \x1b[33mbrave-sky-1\x1b[0m at: \x1b[34mhttps://wandb.ai/me/p/runs/x1\x1b[0m\n"
    attempt.stdout.write_text(text.replace("\x1b[34m", ""))

    assert read_tracking(run).url == "https://wandb.ai/me/p/runs/x1"
    assert read_tracking(run).state == "online"
    attempt.stdout.write_text("View run at https://wandb.ai/me/p/runs/x2\n")
    assert read_tracking(run).url == "https://wandb.ai/me/p/runs/x2"
    assert read_tracking(run, "https://wandb.ai/told").url == "https://wandb.ai/told"


def test_a_flood_of_output_is_read_at_both_ends_only(home):
    run, attempt = place(home)
    with open(attempt.stdout, "wb") as file:
        file.write(b"x\n" * (6 << 20))
        file.write(b"View run at https://wandb.ai/end\n")

    assert read_tracking(run).url == "https://wandb.ai/end"


def test_our_own_trainer_keeps_what_is_offline_beside_the_attempts(home):
    run, _ = place(home)
    directory = offline_run(run, "abc")

    assert read_tracking(run).state == "offline"
    assert read_tracking(run).pending == (str(directory),)


def test_our_own_run_that_is_online_is_so_and_its_address_is_in_its_journal(home):
    run, attempt = place(home)
    offline_run(run, "abc", mode="")
    assert (read_tracking(run).state, read_tracking(run).url) == ("online", "")

    with Journal(attempt.journal) as journal:
        journal.emit(LogLine("info", "View run at https://wandb.ai/me/p/runs/x3"))
    assert read_tracking(run).url == "https://wandb.ai/me/p/runs/x3"
