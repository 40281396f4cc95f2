"""`palaestra plan`: one page or one JSON document, and exit code 2 for what cannot be planned."""

import json

SMALL = ["setup.sessions=4", "setup.batch_size=8", "times.turns=2", "times.session_step=0.2"]


def test_the_page_begins_with_the_run_and_its_limit(palaestra):
    done = palaestra("plan", *SMALL, "--gpus", "2", "--no-scale")
    lines = done.out.splitlines()
    assert (done.code, done.err) == (0, "")
    assert lines[0] == "Qwen/Qwen2.5-VL-3B-Instruct, 2 GPUs, 4 sessions, 8 episodes per update, synchronous"
    assert lines[2].startswith("Limited by ")
    assert any(line.startswith("Learner memory per GPU") for line in lines)
    assert "per 1,000 episodes" in done.out


def test_a_plan_without_measured_times_says_so(palaestra):
    assert "All times are defaults" in palaestra("plan", "--gpus", "1", "--no-scale").out
    assert "All times are defaults" not in palaestra("plan", *SMALL, "--no-scale").out


def test_json_is_one_document_with_the_table(palaestra):
    done = palaestra("plan", *SMALL, "--sessions", "6", "--gpu-hour-price", "4", "--json")
    plan = json.loads(done.out)
    assert plan["config"]["setup"]["sessions"] == 6
    assert plan["cost"]["per_hour"] == 8 * 4 + plan["cost"]["session_cores"] * 0.04
    assert plan["memory"]["learner"]["parts"]["weights"] == 2 * 3_754_622_976
    assert [row["config"]["hardware"]["gpus"] for row in plan["scale"]] == [8, 64, 512, 8, 64, 512]


def test_a_real_run_is_measured_and_planned(palaestra, config):
    trained = palaestra("train", config, "--quiet", "--json")
    run = json.loads(trained.out)["run_id"]
    done = palaestra("plan", "--from", run, "--gpus", "1", "--no-scale", "--json")
    plan = json.loads(done.out)
    assert (plan["from"], plan["config"]["model"]) == ([run], None)
    assert plan["config"]["times"]["turns"] == 32
    assert plan["config"]["setup"]["rows"] == 2
    assert plan["throughput"]["update_seconds"] > 0


def test_what_cannot_be_planned_is_refused_with_a_remedy(palaestra):
    for words, message in (
        (["plan"], "nothing to plan was given"),
        (["plan", "--gpus", "0"], "hardware.gpus = 0"),
        (["plan", "times.session_step=-1"], "times.session_step = -1"),
        (["plan", "model.name=gpt-2"], "the planner does not know this model"),
        (["plan", "--from", "no-such-run"], "no such run"),
        (["plan", "a.yaml"], "cannot be read"),
        (["plan", "setup.sessions=2", "extra"], "is not key=value"),
    ):
        done = palaestra(*words)
        assert (done.code, done.out) == (2, ""), words
        assert message in done.err
