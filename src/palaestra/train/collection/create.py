"""Creates a dataset from a plan: which environment, which behaviour, how much, and the reference scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from palaestra.env.factory import EnvFactory
from palaestra.env.make import EnvConfig, base_env_id, make_env
from palaestra.env.vector import VectorEnv
from palaestra.errors import ConfigError
from palaestra.experience.datasets import Dataset, Episode, create_dataset, find_dataset
from palaestra.experience.datasets.dataset import check_new
from palaestra.experience.datasets.disk_space import check_disk, estimate_bytes
from palaestra.experience.datasets.episodes import ArrayLayout
from palaestra.experience.datasets.import_data import ImportReport, import_d4rl
from palaestra.experience.datasets.scores import check_scores
from palaestra.experience.datasets.spaces import nest
from palaestra.experience.datasets.storage import import_h5py
from palaestra.files.home import Home
from palaestra.runs.record import CheckpointRecord
from palaestra.train.collection.behaviours import (
    Behaviour,
    CheckpointBehaviour,
    NoisyBehaviour,
    RandomBehaviour,
    ScriptedBehaviour,
)
from palaestra.train.collection.collect import (
    NUM_ENVS,
    SCORE_SEED,
    Amount,
    collect_episodes,
    collection_config,
    describe_collection,
    measure_score,
    random_score,
)
from palaestra.train.collection.recorded import Recordings

_MAX_SEED = 2**32 - 1
_RANDOM_SEED = 3_000_017
"""Added to the seed for the random share, so that it uses other episodes."""
RANDOM = "random"
_USUAL_LENGTH = 1000
"""Steps per episode for the estimate of a size, if the environment has no limit."""


@dataclass(frozen=True, kw_only=True)
class CollectionPlan:
    """What `palaestra datasets create` is asked for."""

    dataset_id: str
    amount: Amount
    env_id: str = ""
    """Empty: the environment of the checkpoint."""
    env_kwargs: dict[str, Any] | None = None
    """None: those of the checkpoint, or none."""
    policy: str = ""
    """`random`, or the address of a function; empty with a checkpoint."""
    checkpoint: Path | CheckpointRecord | None = None
    """A checkpoint of palaestra, or the record of one that another trainer saved."""
    recordings: Recordings | None = None
    """Recorded episodes of plays."""
    trust: bool = False
    """Agree to execute the code that a foreign checkpoint needs."""
    deterministic: bool = True
    """The checkpoint takes its most likely actions."""
    noise: float = 0.0
    """Share of actions that are replaced by random ones."""
    random_share: float = 0.0
    """Share of the data that a random policy collects."""
    seed: int = 0
    score_episodes: int = 20
    """Episodes for each reference score; 0 measures none."""
    expert_checkpoint: Path | CheckpointRecord | None = None
    """Measures the expert score in the environment of the dataset."""
    expert_score: float | None = None

    def check(self) -> None:
        """Raise `ConfigError` for options that exclude each other or lie outside their range."""
        if bool(self.policy) + (self.checkpoint is not None) + (self.recordings is not None) != 1:
            reason = "give one of --policy, --checkpoint and --recorded"
            raise ConfigError("--policy", self.policy, reason, "For example --policy random")
        if not self.env_id and self.policy:
            raise ConfigError("--env", "", "required and not given", "For example --env Pendulum-v1")
        if not 0 <= self.seed <= _MAX_SEED:
            raise ConfigError("--seed", self.seed, f"must lie between 0 and {_MAX_SEED}")
        if self.score_episodes < 0:
            raise ConfigError("--score-episodes", self.score_episodes, "must not be negative", "0 measures no score")
        for option, share in (("--noise", self.noise), ("--random-share", self.random_share)):
            if not 0.0 <= share <= 1.0:
                raise ConfigError(option, share, "must lie between 0 and 1", "It is a share")
            if share and self.recordings is not None:
                raise ConfigError(option, share, "recorded episodes are not changed", "Leave it out")
        if self.env_kwargs is not None and self.recordings is not None:
            reason = "recorded episodes have the arguments that they were played with"
            raise ConfigError("--env-kwargs", self.env_kwargs, reason, "Leave it out")
        if self.expert_score is not None and self.expert_checkpoint is not None:
            raise ConfigError(
                "--expert-score", self.expert_score, "--expert-checkpoint is given too", "Give one of them"
            )
        check_scores(None, self.expert_score)


def collect_dataset(
    home: Home, plan: CollectionPlan, report: Callable[[int, int], None] | None = None, *, root: Path | None = None
) -> Dataset:
    """Collect and write a dataset; `report` is called with the steps and episodes so far.

    `root`: the directory of datasets, by default that of the state directory.
    """
    plan.check()
    root = root or home.datasets
    check_new(root, plan.dataset_id)
    import_h5py()
    with ExitStack() as stack:
        config = collection_config(_read_env(plan, home), plan.amount, 1 if _is_foreign(plan) else NUM_ENVS)
        env = make_env(config)
        stack.callback(env.close)
        _check_disk(root, plan, config, env)
        scores = _measure_scores(plan, home, config, env)
        source: Recordings | Behaviour
        if plan.recordings is not None:
            source, episodes = plan.recordings, plan.recordings.episodes(env.action_space)
        else:
            source = _make_behaviour(plan, home, config, env)
            stack.callback(source.close)
            episodes = _collect_parts(plan, env, source)
        about = {"seed": plan.seed, **source.describe()}
        if plan.random_share:
            about["random_share"] = plan.random_share
        facts = describe_collection(plan.dataset_id, config, env, **about)
        with create_dataset(root, replace(facts, algorithm=str(facts.about["policy"]), **scores)) as writer:
            for episode in episodes:
                writer.add(episode)
                if report is not None:
                    report(writer.num_steps, writer.num_episodes)
    return find_dataset(plan.dataset_id, root)


def _measure_scores(plan: CollectionPlan, home: Home, config: EnvConfig, env: VectorEnv) -> dict[str, Any]:
    """The reference scores; `ConfigError` before anything is collected if the expert is not better than random."""
    expert = _measure_expert(plan, home, config)
    low = random_score(env, episodes=plan.score_episodes, seed=plan.seed) if plan.score_episodes else None
    if plan.expert_checkpoint is not None and low is not None and expert is not None and expert <= low:
        name = getattr(plan.expert_checkpoint, "checkpoint_id", str(plan.expert_checkpoint))
        reason = f"its score {expert:g} is not above the random score {low:g}"
        remedy = "Choose a better checkpoint, or measure more episodes with --score-episodes"
        raise ConfigError("--expert-checkpoint", name, reason, remedy)
    check_scores(low, expert)
    return {"random_score": low, "expert_score": expert}


def _is_foreign(plan: CollectionPlan) -> bool:
    return isinstance(plan.checkpoint, CheckpointRecord)


def _collect_parts(plan: CollectionPlan, env: VectorEnv, behaviour: Behaviour) -> Iterator[Episode]:
    """The random share of the data first, then the rest."""
    mixed, rest = plan.amount.split(plan.random_share)
    if mixed is not None:
        yield from collect_episodes(env, RandomBehaviour(env.action_space), mixed, seed=plan.seed + _RANDOM_SEED)
    if rest is not None:
        yield from collect_episodes(env, behaviour, rest, seed=plan.seed)


def import_file(
    root: Path,
    file: Path,
    dataset_id: str,
    env: EnvConfig,
    *,
    seed: int = 0,
    score_episodes: int = 20,
    random_score: float | None = None,
    expert_score: float | None = None,
) -> ImportReport:
    """Import an HDF5 file in the style of D4RL with the spaces of an environment.

    Its random score is measured unless it is given.
    """
    check_scores(random_score, expert_score)
    check_new(root, dataset_id)
    if random_score is None and score_episodes:
        random_score = measure_random_score(env, episodes=score_episodes, seed=seed)
        check_scores(random_score, expert_score)
    config = collection_config(env, Amount(episodes=1))
    spec = EnvFactory(base_env_id(env.id)).find_spec()
    vector = make_env(config)
    try:
        described = describe_collection(dataset_id, config, vector)
    finally:
        vector.close()
    facts = replace(
        described,
        random_score=random_score,
        expert_score=expert_score,
        about={"env_kwargs": dict(env.kwargs)} if env.kwargs else {},
        algorithm=file.name,
    )
    return import_d4rl(root, file, facts, max_episode_steps=None if spec is None else spec.max_episode_steps)


def measure_random_score(env: EnvConfig, *, episodes: int, seed: int) -> float:
    """Mean return of random actions in new environments."""
    if episodes < 1:
        raise ConfigError("--score-episodes", episodes, "must not be negative", "0 measures no score")
    if not 0 <= seed <= _MAX_SEED:
        raise ConfigError("--seed", seed, f"must lie between 0 and {_MAX_SEED}")
    vector = make_env(collection_config(env, Amount(episodes=episodes)))
    try:
        return random_score(vector, episodes=episodes, seed=seed)
    finally:
        vector.close()


def _check_disk(root: Path, plan: CollectionPlan, config: EnvConfig, env: VectorEnv) -> None:
    """Raise `DatasetError` if the data, as far as its size is known before, does not fit on the disk."""
    spec = EnvFactory(base_env_id(config.id)).find_spec()
    limit = config.max_episode_steps or (spec.max_episode_steps if spec is not None else None)
    steps, episodes = plan.amount.steps, plan.amount.episodes
    if episodes is not None:
        steps = episodes * (limit or _USUAL_LENGTH)
    assert steps is not None
    layout = ArrayLayout(nest(env.observation_space), env.action_space)
    check_disk(root, estimate_bytes(layout, steps, episodes or steps // 20), plan.dataset_id)


def _read_env(plan: CollectionPlan, home: Home) -> EnvConfig:
    """The environment of the plan, with the arguments that the checkpoint was trained with unless others are given."""
    if plan.recordings is not None:
        return EnvConfig(id=plan.recordings.env_id, kwargs=plan.recordings.parameters)
    given = EnvConfig(id=plan.env_id, kwargs=plan.env_kwargs or {}) if plan.env_id else None
    if plan.checkpoint is None:
        assert given is not None
        return given
    if isinstance(plan.checkpoint, CheckpointRecord):
        env_id = plan.env_id or plan.checkpoint.env_id
        if not env_id:
            raise ConfigError("--env", "", "the environment of the checkpoint is unknown", "Give --env")
        from palaestra.train.collection.foreign import read_env_kwargs

        kwargs = read_env_kwargs(plan.checkpoint, home) if plan.env_kwargs is None else plan.env_kwargs
        return EnvConfig(id=env_id, kwargs=kwargs)
    from palaestra.learner.checkpoint import load_checkpoint
    from palaestra.train.config import config_from

    trained = config_from(load_checkpoint(plan.checkpoint, kind="vector").about["config"]).env
    if given is not None and base_env_id(given.id) != base_env_id(trained.id):
        reason = f"the checkpoint was trained in {trained.id}"
        raise ConfigError("--env", given.id, reason, "Leave --env out, or choose another checkpoint")
    kwargs = trained.kwargs if plan.env_kwargs is None else plan.env_kwargs
    return EnvConfig(id=trained.id, kwargs=kwargs, max_episode_steps=trained.max_episode_steps)


def _make_behaviour(plan: CollectionPlan, home: Home, config: EnvConfig, env: VectorEnv) -> Behaviour:
    behaviour: Behaviour
    if isinstance(plan.checkpoint, CheckpointRecord):
        from palaestra.train.collection.foreign import ForeignBehaviour

        behaviour = ForeignBehaviour(
            plan.checkpoint,
            home,
            config,
            env.action_space,
            deterministic=plan.deterministic,
            trust=plan.trust,
        )
    elif plan.checkpoint is not None:
        behaviour = CheckpointBehaviour(plan.checkpoint, env, deterministic=plan.deterministic)
    elif plan.policy == RANDOM:
        behaviour = RandomBehaviour(env.action_space)
    else:
        behaviour = ScriptedBehaviour(plan.policy, env.action_space)
    return NoisyBehaviour(behaviour, env.action_space, plan.noise) if plan.noise else behaviour


def _measure_expert(plan: CollectionPlan, home: Home, config: EnvConfig) -> float | None:
    """The given expert score, or the mean return of the expert in the environment of the dataset."""
    expert, option = plan.expert_checkpoint, "--expert-checkpoint"
    if expert is None or not plan.score_episodes:
        return plan.expert_score
    if isinstance(expert, CheckpointRecord):
        from palaestra.train.collection.foreign import ForeignBehaviour

        with ExitStack() as stack:
            env = make_env(config.model_copy(update={"num_envs": 1}))
            stack.callback(env.close)
            space = env.action_space
            behaviour = ForeignBehaviour(
                expert, home, config, space, deterministic=True, trust=plan.trust, option=option
            )
            stack.callback(behaviour.close)
            return measure_score(env, behaviour, episodes=plan.score_episodes, seed=plan.seed)
    from palaestra.train.evaluation import evaluate_checkpoint

    def make(trained: EnvConfig) -> VectorEnv:
        if base_env_id(trained.id) != base_env_id(config.id):
            reason = f"was trained in {trained.id}, the data comes from {config.id}"
            raise ConfigError(option, str(expert), reason, "Choose another checkpoint")
        settings = {"kwargs": config.kwargs, "max_episode_steps": config.max_episode_steps}
        return make_env(trained.model_copy(update=settings))

    seed = plan.seed + SCORE_SEED
    return evaluate_checkpoint(expert, episodes=plan.score_episodes, seed=seed, make=make).mean_return
