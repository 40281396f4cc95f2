"""One policy for several tasks: collect for each of them, then learn from all at once.

`learn` takes a list of rollouts and keeps the advantages of each to itself. The task is part of what the policy sees,
so it can tell them apart: task 0 wants lever 0 held, task 1 wants lever 1. The trainer remembers the newest rollouts of
each task; an environment with a method `set_task_trajectories` is given them.

    python examples/meta_training.py
"""

from palaestra import ActorCritic, PPOTrainer, Rollout, as_vector_env, evaluate
from palaestra.env.toy import Gate


class MetaTrainer(PPOTrainer):
    """Collects for a task that is named."""

    def collect_for_task(self, task: int, n_steps: int) -> Rollout:
        self.env.set_task(task)  # counts from each environment's next episode on
        return self.collect_rollouts(n_steps, task_trajectories=self.get_task_trajectories(task))

    def meta_train(self, tasks: list[int], rounds: int, steps_per_task: int) -> None:
        for _ in range(rounds):
            self.learn([self.collect_for_task(task, steps_per_task) for task in tasks])


def main(rounds: int = 30, steps_per_task: int = 64, seed: int = 0):
    env = as_vector_env([Gate(difficulty=3) for _ in range(8)])
    policy = ActorCritic(env.observation_space, env.action_space, seed=seed)
    trainer = MetaTrainer(policy, env, learning_rate=1e-3, batch_size=128, seed=seed)

    trainer.meta_train(tasks=[0, 1], rounds=rounds, steps_per_task=steps_per_task)

    success = {}
    for task in (0, 1):
        on_task = as_vector_env([Gate(difficulty=3, task=task)])
        success[task] = evaluate(policy, on_task, episodes=20, seed=seed).mean_return
        print(f"task {task}: {success[task]:.0%} of the gates opened")
    env.close()
    return success


if __name__ == "__main__":
    main()
