"""The rate that is chosen, and the sentence that says why."""

import pytest

from palaestra.learner.trajectories.update import choose_learning_rate, learning_rate_factor


@pytest.mark.parametrize(
    ("lora", "supervised", "rate"),
    [(True, True, 2e-4), (False, True, 1e-5), (True, False, 1e-5), (False, False, 1e-6)],
)
def test_an_adapter_bears_more_than_the_whole_model_and_imitation_more_than_a_gradient_of_rewards(
    lora, supervised, rate
):
    assert choose_learning_rate(lora=lora, supervised=supervised).rate == rate


def test_the_choice_is_explained():
    said = choose_learning_rate(lora=True, supervised=False).reason
    assert "1e-05" in said
    assert "LoRA" in said
    assert "policy gradient" in said


def test_a_given_rate_is_used_as_it_is():
    assert choose_learning_rate(lora=True, supervised=True, given=0.5) == (0.5, "learning rate 0.5, as configured")


def test_the_rate_grows_over_its_warmup_and_falls_evenly_to_a_tenth():
    assert [learning_rate_factor(update, warmup=4, decay=None) for update in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert [learning_rate_factor(update, warmup=0, decay=9) for update in (0, 3, 9, 100)] == pytest.approx(
        [1.0, 0.7, 0.1, 0.1]
    )
    assert learning_rate_factor(1, warmup=4, decay=9) == pytest.approx(0.5 * 0.9)
