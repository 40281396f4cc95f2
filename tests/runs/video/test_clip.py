import os

import pytest

from palaestra.runs.state.attempt_files import AttemptPlan
from palaestra.runs.video.clip import ClipReport, compute_recording_overhead, list_clips, prune_clips

REPORT = ClipReport(frames=200, seconds=4.0, encode_s=1.0, sps_with=100.0, sps_without=400.0, slowdown=4.0)


def place(home):
    run = home.run("run")
    attempt = run.attempt(1)
    attempt.videos.mkdir(parents=True)
    (attempt.work / "videos" / "x").mkdir(parents=True)
    AttemptPlan(videos=("videos/**/*.mp4",)).write(attempt)
    return run, attempt


def written(path, when):
    path.write_bytes(b"x" * 10)
    os.utime(path, (when, when))
    return path


def test_clips_of_ours_and_of_the_trainer_are_listed_newest_first(home, tmp_path):
    run, attempt = place(home)
    ours = written(attempt.videos / "a.webm", 20)
    REPORT.write(ours)
    theirs = written(attempt.work / "videos" / "x" / "rl-video-episode-0.mp4", 10)
    written(attempt.work / "videos" / "x" / "rl-video-episode-0.meta.json", 30)
    written(attempt.videos / ".half.webm", 30)
    (attempt.videos / "link.webm").symlink_to(written(tmp_path / "outside.webm", 40))

    found = list_clips(run)

    assert [(clip.path, clip.created, clip.report) for clip in found] == [
        (str(ours), 20.0, REPORT),
        (str(theirs), 10.0, None),
    ]


def test_all_but_the_newest_go_with_their_reports(home):
    run, attempt = place(home)
    for number in range(13):
        REPORT.write(written(attempt.videos / f"{number:02d}.webm", 100 + number))

    gone = prune_clips(run, keep=10)

    assert sorted(os.path.basename(clip.path) for clip in gone) == ["00.webm", "01.webm", "02.webm"]
    assert len(list(attempt.videos.iterdir())) == 20
    assert prune_clips(run, keep=10) == []


def test_the_pace_of_minutes_with_clips_is_compared_with_the_others():
    # 20 minutes: 600 steps each, but 300 in minutes 3 and 7, at whose ends a clip was complete.
    progress, step = [(0.0, 0)], 0
    for minute in range(20):
        for second in range(1, 61):
            step += 5 if minute in (3, 7) else 10
            progress.append((minute * 60.0 + second, step))

    pace = compute_recording_overhead(progress, [3 * 60 + 59.0, 7 * 60 + 59.0])

    assert pace.sps_with == pytest.approx(5.0, rel=0.02)
    assert pace.sps_without == pytest.approx(10.0, rel=0.02)
    assert pace.slowdown == pytest.approx(2.0, rel=0.03)


TEN = [(0.0, 0), (10.0, 10)]


@pytest.mark.parametrize(
    ("progress", "filmed"), [([], [1.0]), ([(0.0, 0)], [0.0]), (TEN, []), (TEN, [5.0]), ([(0.0, 0)] * 3, [0.0])]
)
def test_without_anything_to_compare_there_is_no_pace(progress, filmed):
    assert compute_recording_overhead(progress, filmed) is None
