"""Q-learning and SARSA on a table: textbook steps, schedules, what they learn, and what is refused."""

import gymnasium
import numpy as np
import pytest

from palaestra.actor.tabular_source import TabularSource
from palaestra.env import EnvConfig, make_env
from palaestra.env.in_process import InProcessEnv
from palaestra.errors import CheckpointError, ConfigError, EnvironmentContractError, ExperienceError, NonFiniteError
from palaestra.experience.replay import TransitionBatch
from palaestra.kernels import tabular
from palaestra.learner.conformance import check_learner
from palaestra.learner.transitions.tabular import TabularLearner, TabularQLearning, TabularSarsa
from palaestra.policy.tabular import TabularPolicy
from palaestra.transport.conformance import check_source
from palaestra.transport.source import SavedState

COLUMNS = ("observation", "action", "reward", "next_observation", "terminated", "next_action")


def make_parts(env_id, algorithm, *, compiled, seed=5, total=10_000, **env):
    vector = make_env(EnvConfig(id=env_id, num_envs=1, vectorization="in_process", **env))
    policy = TabularPolicy(vector.observation_space, vector.action_space)
    source = TabularSource(vector, policy, algorithm, seed=seed, total_timesteps=total, compiled=compiled)
    progress = lambda: min(1.0, source.progress.steps / total)  # noqa: E731
    return source, TabularLearner(policy, algorithm, progress=progress)


def run(source, learner, steps):
    """Train, and return the episodes."""
    episodes = []
    while source.progress.steps < steps:
        batch = source.next_batch()
        learner.update(batch.experience)
        source.release(batch, learner.version)
        episodes += batch.episodes
    return episodes


def textbook(env_id, algorithm, *, seed, total, limit):
    """The algorithms as in Sutton and Barto, with Gymnasium, and numbers from the same generators."""
    derived = int(np.random.SeedSequence([seed, 0]).generate_state(1)[0])
    choices = np.random.default_rng(np.random.SeedSequence([seed, 1]))
    env = gymnasium.make(env_id, max_episode_steps=limit)
    config, steps = algorithm.config, 0
    table = np.full((int(env.observation_space.n), int(env.action_space.n)), config.initial_value)

    def choose(state):
        epsilon = algorithm.exploration(steps / total)
        return tabular.epsilon_greedy_action(table[state], epsilon, choices.random(), choices.random())

    first = True
    while steps < total:
        state, _ = env.reset(seed=derived) if first else env.reset()
        first, over, action = False, False, None
        while not over and steps < total:
            action = choose(state) if action is None else action
            following, reward, terminated, truncated, _ = env.step(action)
            following_action = choose(following) if algorithm.chooses_next and not terminated else None
            steps += 1
            rate = algorithm.learning_rate(steps / total)
            target = reward
            if not terminated:
                chosen = table[following].max() if following_action is None else table[following, following_action]
                target += config.gamma * chosen
            table[state, action] += rate * (target - table[state, action])
            state, action, over = following, following_action, terminated or truncated
    return table


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("cls", [TabularQLearning, TabularSarsa])
@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "CliffWalking-v1"])
def test_an_update_per_step_is_the_textbook_algorithm(env_id, cls, compiled):
    algorithm = cls(train_freq=1, learning_rate=0.5, learning_rate_final=0.1, gamma=0.9)
    source, learner = make_parts(env_id, algorithm, compiled=compiled, total=2_000, max_episode_steps=40)
    run(source, learner, 2_000)
    expected = textbook(env_id, algorithm, seed=5, total=2_000, limit=40)
    np.testing.assert_allclose(learner.policy.array, expected, rtol=0, atol=1e-12)
    assert np.abs(expected).max() > 0.1


@pytest.mark.parametrize("cls", [TabularQLearning, TabularSarsa])
@pytest.mark.parametrize("env_id", ["FrozenLake8x8-v1", "CliffWalking-v1", "Taxi-v4"])
def test_walking_the_table_and_stepping_the_environment_give_the_same_training(env_id, cls):
    results = []
    for compiled in (True, False):
        source, learner = make_parts(env_id, cls(), compiled=compiled, total=3_000, max_episode_steps=50)
        assert (source.table is not None) == compiled
        results.append((run(source, learner, 3_000), learner.policy.array.copy()))
    (walked, table), (stepped, other) = results
    assert walked == stepped
    assert len(walked) >= 10
    assert np.array_equal(table, other)


def test_linear_and_exponential_schedules_reach_their_final_value():
    linear = TabularQLearning(exploration_initial=1.0, exploration_final=0.2, exploration_fraction=0.5)
    np.testing.assert_allclose([linear.exploration(p) for p in (0.0, 0.25, 0.5, 1.0)], [1.0, 0.6, 0.2, 0.2])
    ratio = TabularQLearning(learning_rate=0.4, learning_rate_final=0.1, schedule="exponential")
    np.testing.assert_allclose([ratio.learning_rate(p) for p in (0.0, 0.5, 1.0)], [0.4, 0.2, 0.1])
    assert TabularQLearning(learning_rate=0.3).learning_rate(0.7) == 0.3


def optimal_value(world, limit):
    """Value of the best policy that sees the remaining steps, by backward induction."""
    value = np.zeros(len(world.P))
    for _ in range(limit):
        value = np.array(
            [
                max(sum(p * (r + (0.0 if end else value[s])) for p, s, r, end in rows) for rows in actions.values())
                for actions in world.P.values()
            ]
        )
    return float(world.initial_state_distrib @ value)


def greedy_value(world, table, limit):
    """Value of the greedy policy of a table within a number of steps, exactly."""
    best, value = table.argmax(1), np.zeros(len(world.P))
    for _ in range(limit):
        value = np.array(
            [
                sum(p * (r + (0.0 if end else value[s])) for p, s, r, end in world.P[state][best[state]])
                for state in range(len(world.P))
            ]
        )
    return float(world.initial_state_distrib @ value)


def test_q_learning_comes_close_to_the_optimum_of_the_slippery_lake():
    algorithm = TabularQLearning(
        gamma=0.997,
        initial_value=1.0,
        exploration_initial=0.1,
        exploration_final=0.02,
        exploration_fraction=1.0,
        learning_rate=0.2,
        learning_rate_final=0.002,
        schedule="exponential",
    )
    source, learner = make_parts("FrozenLake8x8-v1", algorithm, compiled=True, total=500_000)
    run(source, learner, 500_000)
    optimum = optimal_value(source.table.world, 200)
    assert 0.91 < optimum < 0.92
    assert greedy_value(source.table.world, learner.policy.array, 200) > optimum - 0.04


def test_q_learning_walks_along_the_cliff_and_sarsa_keeps_away_from_it():
    settings = {"gamma": 1.0, "learning_rate": 0.5, "exploration_initial": 0.1, "exploration_final": 0.1}
    values = []
    for algorithm, steps in (
        (TabularQLearning(**settings), 60_000),
        (TabularSarsa(**settings, learning_rate_final=0.05), 200_000),
    ):
        source, learner = make_parts("CliffWalking-v1", algorithm, compiled=True, total=steps, max_episode_steps=200)
        run(source, learner, steps)
        values.append(greedy_value(source.table.world, learner.policy.array, 200))
    assert values[0] == -13.0
    assert -19.0 <= values[1] <= -15.0


def transitions(**changes):
    columns = {
        "observation": np.array([[0], [1]]),
        "action": np.array([[1], [0]]),
        "reward": np.array([[0.0], [1.0]], np.float32),
        "next_observation": np.array([[1], [0]]),
        "terminated": np.array([[False], [True]]),
        "next_action": np.array([[0], [0]]),
    }
    return TransitionBatch({**columns, **changes})


def make_learner(algorithm):
    policy = TabularPolicy(gymnasium.spaces.Discrete(2), gymnasium.spaces.Discrete(2))
    return TabularLearner(policy, algorithm)


@pytest.mark.parametrize("cls", [TabularQLearning, TabularSarsa])
def test_the_learner_keeps_the_rules_of_learners(cls):
    check_learner(lambda: make_learner(cls(gamma=0.5)), transitions(), lambda one: one.policy.array.tolist())


@pytest.mark.parametrize("compiled", [True, False])
def test_the_source_keeps_the_rules_of_sources(compiled):
    check_source(lambda: make_parts("FrozenLake-v1", TabularSarsa(), compiled=compiled)[0])


@pytest.mark.parametrize("name", ["observation", "next_observation", "action", "next_action"])
@pytest.mark.parametrize("bad", [-1, 2])
def test_a_number_outside_the_table_is_refused_before_a_kernel_uses_it(name, bad):
    learner = make_learner(TabularSarsa())
    with pytest.raises(ExperienceError, match=f"{name} has {bad}, the table has 0 to 1"):
        learner.update(transitions(**{name: np.array([[0], [bad]])}))
    assert not learner.policy.array.any()


def test_a_reward_that_is_not_finite_leaves_the_table_as_it_was():
    learner = make_learner(TabularQLearning(initial_value=2.0))
    with pytest.raises(NonFiniteError, match="not finite"):
        learner.update(transitions(reward=np.array([[np.inf], [1.0]], np.float32)))
    assert (learner.policy.array == 2.0).all()
    assert learner.version == 0


def test_a_checkpoint_of_another_algorithm_is_refused_and_one_of_the_other_tabular_one_is_not():
    learner = make_learner(TabularQLearning())
    learner.check_state(SavedState({}, {"algorithm": "TabularSarsa"}), place="here")
    with pytest.raises(CheckpointError, match="was trained by DQN"):
        learner.check_state(SavedState({}, {"algorithm": "DQN"}), place="here")


def test_spaces_without_a_table_are_refused_with_a_reason():
    box, discrete = gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Discrete(3)
    with pytest.raises(ConfigError, match="row for each state"):
        TabularPolicy(box, discrete)
    with pytest.raises(ConfigError, match="column for each action"):
        TabularPolicy(discrete, box)
    with pytest.raises(ConfigError, match="of memory"):
        TabularPolicy(gymnasium.spaces.Discrete(10**12), discrete)


def test_several_environments_are_refused():
    env = make_env(EnvConfig(id="FrozenLake-v1", num_envs=2, vectorization="in_process"))
    policy = TabularPolicy(env.observation_space, env.action_space)
    with pytest.raises(ConfigError, match=r"env\.num_envs"):
        TabularSource(env, policy, TabularQLearning(), seed=0, total_timesteps=10)


def test_an_exponential_schedule_to_zero_is_refused():
    with pytest.raises(ConfigError, match="cannot reach 0"):
        TabularQLearning(schedule="exponential", exploration_final=0.0)


class Shifted(gymnasium.Env):
    """States 10 to 12 and actions 5 to 6; action 6 moves right, and the end pays 1. `escape` leaves the space."""

    observation_space = gymnasium.spaces.Discrete(3, start=10)
    action_space = gymnasium.spaces.Discrete(2, start=5)

    def __init__(self, escape=False):
        self.escape = escape

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = 10
        return self.state, {}

    def step(self, action):
        self.state += int(action) - 5
        state = 99 if self.escape else self.state
        return state, float(self.state == 12), self.state == 12, False, {}


def test_spaces_that_do_not_start_at_zero_are_counted_from_zero():
    env = InProcessEnv(Shifted, 1)
    policy = TabularPolicy(env.observation_space, env.action_space)
    algorithm = TabularQLearning(gamma=0.5, learning_rate=1.0)
    source = TabularSource(env, policy, algorithm, seed=0, total_timesteps=640)
    run(source, TabularLearner(policy, algorithm), 640)
    np.testing.assert_allclose(policy.array[:2], [[0.25, 0.5], [0.5, 1.0]])


def test_a_state_outside_the_space_names_the_environment():
    env = InProcessEnv(lambda: Shifted(escape=True), 1)
    policy = TabularPolicy(env.observation_space, env.action_space)
    source = TabularSource(env, policy, TabularQLearning(), seed=0, total_timesteps=640)
    with pytest.raises(EnvironmentContractError, match="state 89 of 3"):
        source.next_batch()
