"""Metrics in the text that programs print for people."""

import json
import math
import random
import time

import pytest

from palaestra.runs.ingest.printed_metrics import MAX_NAMES, RULES, PrintedMetrics


def read(*lines, printed=None):
    """Steps and metrics of these lines."""
    printed = printed or PrintedMetrics()
    steps = []
    for line in lines:
        step = printed.parse_json(line)
        steps += printed.parse(line) if step is None else [step]
    return [(step.env_step, step.metrics) for step in [*steps, *printed.finish()]]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.title)
def test_every_example_of_the_rules_means_what_the_rules_say(rule):
    assert read(*rule.example.split("\n")) == [(rule.step, dict(rule.metrics))]


@pytest.mark.parametrize(
    ("line", "step", "metrics"),
    [
        # minGPT, nanoGPT, micrograd
        ("iter_dt 12.34ms; iter 100: train loss 2.34567", 100, {"iter_dt": 12.34, "train_loss": 2.34567}),
        ("step 250: train loss 2.4012, val loss 2.5001", 250, {"train_loss": 2.4012, "val_loss": 2.5001}),
        ("iter 0: loss 4.2664, time 43.12ms, mfu -100.00%", 0, {"loss": 4.2664, "time": 43.12, "mfu": -100.0}),
        ("step 5 loss 0.89584, accuracy 50.0%", 5, {"loss": 0.89584, "accuracy": 50.0}),
        # pytorch/examples: imagenet, reinforcement learning, language model
        ("Epoch: [0][ 10/5005]\tTime  0.5 ( 0.6)\tLoss 6.9e+00 (7.0)", 10, {"Time": 0.5, "Loss": 6.9}),
        ("Episode 10\tLast reward: 12.00\tAverage reward: 10.52", 10, {"Last_reward": 12.0, "Average_reward": 10.52}),
        ("| epoch   2 |   200/ 2983 batches | lr 20.00 | ppl  205.5", 3183, {"lr": 20.0, "ppl": 205.5}),
        # tutorials, GANs, Transformers, rsl_rl
        ("Epoch [3/10], Step [100/600], Loss: 0.3012", 1300, {"Loss": 0.3012}),
        ("[Epoch 1/200] [Batch 3/938] [D loss: 0.5] [G loss: 0.75]", 3, {"D_loss": 0.5, "G_loss": 0.75}),
        ("{'loss': 0.25, 'learning_rate': 5e-05}", 1, {"loss": 0.25, "learning_rate": 5e-05}),
        ("                Mean reward: 12.34", 1, {"Mean_reward": 12.34}),
        # logging, arrays, fractions, thousands, NaN
        ("2026-01-02 03:04:05,678 - INFO - Epoch 5 took 12.5 s with loss 0.3", 5, {"took": 12.5, "loss": 0.3}),
        ("INFO:root:step 10 loss 0.5", 10, {"loss": 0.5}),
        ("loss=tensor(2.5, grad_fn=<x>) step=4", 4, {"loss": 2.5}),
        ("step 1,200: tokens 12,345", 1200, {"tokens": 12345.0}),
        ("step 3: loss inf", 3, {"loss": math.inf}),
        ("\x1b[1mstep 3\x1b[0m: \x1b[32mloss 0.5\x1b[0m", 3, {"loss": 0.5}),
        ('INFO {"global_step": 12, "metrics": {"loss": 0.5}, "time": 1.5}', 12, {"loss": 0.5}),
        ('{"iteration": 7.0, "ok": true, "loss": "NaN-like", "x": 2}', 7, {"x": 2.0}),
    ],
)  # fmt: skip
def test_the_prints_of_well_known_programs_are_read(line, step, metrics):
    assert read(line) == [(step, metrics)]


@pytest.mark.parametrize(
    "line",
    [
        "number of parameters: 10.65M",
        "seed: 42",
        "Using device: cuda:0",
        "TensorBoard at http://localhost:6006/ (Press CTRL+C to quit)",
        '  File "train.py", line 12, in main',
        "Saving checkpoint at step 900 to /tmp/model-5.pt",
        "100%|##########| 938/938 [00:05<00:00, 170.30it/s]",
        "eta: 0:00:10",
        "2026-01-02 03:04:05 started",
        "[1, 2, 3]",
        '{"broken": ',
        "{}",
        "[" * 5000,
        '{"a":' * 5000 + "}" * 5000,
        "=" * 1990,
        "",
    ],
)
def test_ordinary_output_has_no_metrics(line):
    assert read(line) == []


def test_nan_is_a_value():
    ((step, metrics),) = read("loss: nan")
    assert step == 1
    assert list(metrics) == ["loss"]
    assert math.isnan(metrics["loss"])


def test_a_line_without_a_step_belongs_to_the_last_one():
    lines = ["Train Epoch: 1 [0/100 (0%)]\tLoss: 2.5", "Train Epoch: 1 [60/100 (60%)]\tLoss: 1.5", "Test: loss: 0.5"]
    assert read(*lines, "Train Epoch: 2 [20/100 (20%)]\tLoss: 1.0") == [
        (0, {"Loss": 2.5}),
        (60, {"Loss": 1.5}),
        (60, {"Test/loss": 0.5}),
        (120, {"Loss": 1.0}),
    ]


def test_settings_are_not_metrics_unless_there_is_nothing_else():
    settings = ["{'lr': 0.001, 'dropout': 0.2}", "learning_rate = 0.5"]
    assert read(*settings, "step 1: loss 0.5") == [(1, {"loss": 0.5})]
    assert read(*settings, "accuracy: 0.97") == [
        (1, {"lr": 0.001, "dropout": 0.2}),
        (1, {"learning_rate": 0.5}),
        (1, {"accuracy": 0.97}),
    ]


def test_lines_without_any_step_are_counted_once_they_are_repeated():
    lines = ["lr: 0.1", "loss: 0.75", "acc: 0.5", "loss: 0.5", "loss: 0.25"]
    assert read(*lines) == [(1, {"loss": 0.75}), (2, {"loss": 0.5}), (3, {"loss": 0.25})]


def test_a_progress_bar_that_begins_again_counts_on():
    bars = [f"| {at}/10 [00:01<00:01, loss={at / 4}]" for at in (5, 10, 5)]
    assert [step for step, _ in read(*bars)] == [5, 10, 15]


def test_reading_continues_from_the_state_after_any_line():
    example = [line for rule in RULES for line in rule.example.split("\n")]
    whole = read(*example)
    for cut in range(len(example)):
        first = PrintedMetrics()
        steps = [step for line in example[:cut] for step in _parse(first, line)]
        second = PrintedMetrics(json.loads(json.dumps(first.state())))
        steps += [step for line in example[cut:] for step in _parse(second, line)]
        steps += second.finish()
        assert [(step.env_step, step.metrics) for step in steps] == whole


def _parse(printed, line):
    step = printed.parse_json(line)
    return printed.parse(line) if step is None else [step]


def test_a_program_that_invents_names_gets_two_thousand():
    steps = read(*(f"step {number}: key{number} 0.5" for number in range(3000)))
    assert len(steps) == MAX_NAMES == 2000
    assert len(read(json.dumps({f"key{number}": number for number in range(1_000_000)}))[0][1]) == MAX_NAMES


def test_garbage_is_read_in_bounded_time():
    generator = random.Random(7)
    alphabet = "abc d1 e:=/|.,-[]%\x00\ufffd"
    lines = ["".join(generator.choices(alphabet, k=2000)) for _ in range(100)]
    lines += [bytes(generator.choices(range(256), k=300)).decode("utf-8", "replace") for _ in range(300)]
    lines += ["a " * 1000, "a: " * 600, "1 " * 1000, "x=1" * 600, "-" * 1999 + "x", "| " * 999]
    begun = time.perf_counter()
    read(*lines)
    assert time.perf_counter() - begun < 5
