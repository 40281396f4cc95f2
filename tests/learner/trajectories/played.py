"""Episodes that the built-in model really played, on sessions without a browser, in groups of one start."""

import asyncio
import itertools

from palaestra.actor.agent import VlmAgent
from palaestra.actor.inference import BatchedInference
from palaestra.actor.pool import play_all
from palaestra.actor.task_runner import ActorConfig, EpisodeRequest, TaskRunner
from palaestra.policy.vlm import ModelConfig, VLMPolicy
from palaestra.policy.vlm.sampler import LocalSampler
from palaestra.sessions.fake import FakeSession
from palaestra.sessions.task import TaskRequest

MODEL = ModelConfig(name="tiny", max_new_tokens=24, history=0, lora_rank=4)
SIZE = 4


def build_policy():
    """The same weights each time."""
    return VLMPolicy.from_config(MODEL, seed=1)


def play_groups(policy, seeds, *, temperature=1.0):
    """One group for each seed."""
    numbers = itertools.count()

    async def open_session():
        session = FakeSession()
        session.session_id = f"session-{next(numbers)}"
        return session

    async def played():
        inference = BatchedInference(LocalSampler(policy, threads=1), temperature=temperature, lockstep=True)
        agent = VlmAgent(inference.sample_reply, policy.grammar, temperature=temperature)
        runner = TaskRunner(open_session, agent, ActorConfig(max_steps_per_episode=2))
        orders = [
            EpisodeRequest(f"e{seed}-{member}", TaskRequest("fake/button", seed), 100 * seed + member, f"g{seed}")
            for seed in seeds
            for member in range(SIZE)
        ]
        try:
            return await play_all(
                runner.run_episode, orders, concurrent=len(orders), set_num_actors=inference.set_num_actors
            )
        finally:
            await inference.close()

    made = asyncio.run(played())
    return [made[start : start + SIZE] for start in range(0, len(made), SIZE)]
