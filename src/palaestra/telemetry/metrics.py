"""`METRICS`: the meaning of every metric of a `TrainingStep`, also rendered as docs/metrics.md.

Trainers of other projects may report further metrics.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["METRICS", "Metric", "render_metrics_page"]


class Metric(NamedTuple):
    """One metric: its unit, its meaning, and what to do about a bad value."""

    unit: str
    meaning: str
    bad: str


METRICS: dict[str, Metric] = {
    "env_step": Metric(
        "steps",
        "Environment steps taken so far, over all environments; the x axis of every curve.",
        "Not increasing: collection is stuck; check the environment.",
    ),
    "update": Metric(
        "updates",
        "Number of learner updates so far.",
        "Few updates in many steps learn slowly; shorten the rollout.",
    ),
    "episodes": Metric(
        "episodes",
        "Episodes that have ended so far.",
        "Still 0 after many steps: episodes never end; give the environment a time limit.",
    ),
    "steps_per_second": Metric(
        "steps/s",
        "Environment steps per second of wall-clock time, collecting and learning together.",
        "A drop means a busy machine or an environment that slows down; compare the two times below.",
    ),
    "collect_seconds": Metric(
        "s",
        "Time this update spent acting in the environments.",
        "Much above learn_seconds: the environment is the bottleneck; use more worker processes.",
    ),
    "learn_seconds": Metric(
        "s",
        "Time this update spent on gradients.",
        "Much above collect_seconds: use fewer epochs, larger minibatches or a smaller network.",
    ),
    "episode_return": Metric(
        "reward",
        "Mean undiscounted, unscaled return of recent episodes; the number to maximise.",
        "Flat for long, or falling after a peak: see the advice above.",
    ),
    "episode_return_min": Metric(
        "reward",
        "Lowest return among the same episodes.",
        "Far below the mean: the policy fails for some initial states; inspect those episodes.",
    ),
    "episode_return_max": Metric(
        "reward",
        "Highest return among the same episodes.",
        "Never above the mean of a random policy: exploration does not reach the reward.",
    ),
    "episode_length": Metric(
        "steps",
        "Mean length of recent episodes.",
        "At the time limit, or only a few steps, although the task requires neither: it is not solved.",
    ),
    "loss": Metric(
        "–",
        "The minimised loss: weighted sum of policy loss, value loss and entropy bonus.",
        "Its level means little, and it need not fall; NaN stops the run with its origin.",
    ),
    "policy_loss": Metric(
        "–",
        "Clipped surrogate objective, negated; hovers near zero.",
        "Large and jumping: advantages are not normalised or the learning rate is too high.",
    ),
    "value_loss": Metric(
        "reward²",
        "Squared error of the value estimate against the returns.",
        "Growing faster than returns do: lower the learning rate, scale rewards or clip gradients.",
    ),
    "entropy": Metric(
        "nats",
        "Entropy of the policy; it falls as the policy becomes more certain.",
        "Near its minimum while returns are low: exploration ended too early; raise the entropy coefficient.",
    ),
    "approx_kl": Metric(
        "nats",
        "Estimated KL divergence between the policy that acted and the policy after the update.",
        "Above about 0.03: steps are too large; lower the learning rate or the epochs, or set a KL limit.",
    ),
    "clip_fraction": Metric(
        "share",
        "Share of samples whose probability ratio left the clip range, so that they have no gradient.",
        "Above about 0.3: as for approx_kl. Always 0: updates are too small; raise the learning rate.",
    ),
    "explained_variance": Metric(
        "share",
        "Share of the variance of returns that the value function predicts; 1 is perfect, 0 a constant.",
        "At or below 0 after the first updates: the critic learns nothing; scale rewards or normalise observations.",
    ),
    "learning_rate": Metric(
        "–",
        "Step size the optimiser used in this update.",
        "Already near 0 with the run far from done: the schedule ends too soon.",
    ),
    "clip_range": Metric(
        "–",
        "Half-width of the interval around ratio 1 in which a sample has a gradient.",
        "Near 0 too early freezes the policy; check its schedule.",
    ),
    "grad_norm": Metric(
        "–",
        "Norm of the whole gradient before it was clipped.",
        "Always far above the clipping limit: the limit sets the step; lower the learning rate.",
    ),
    "actor_grad_norm": Metric(
        "–",
        "Norm of the policy's part of the gradient before clipping.",
        "Near 0 with low returns: the policy is stuck; check entropy and advantage_std.",
    ),
    "critic_grad_norm": Metric(
        "–",
        "Norm of the value function's part of the gradient before clipping.",
        "Much larger than actor_grad_norm in a shared network: lower the value coefficient or scale rewards.",
    ),
    "value_mean": Metric(
        "reward",
        "Mean value estimate over the batch.",
        "Drifting away from return_mean: the critic lags or diverges.",
    ),
    "return_mean": Metric(
        "reward",
        "Mean of the discounted returns that are the targets of the value function.",
        "Exploding: discount too close to 1 for these rewards, or rewards that need scaling.",
    ),
    "advantage_std": Metric(
        "reward",
        "Standard deviation of the advantages before normalisation: the signal in the batch.",
        "Near 0: all actions look alike, and normalisation only amplifies noise; check the reward.",
    ),
    "minibatches": Metric(
        "minibatches",
        "Gradient steps this update took, over all epochs.",
        "Well below epochs times minibatches per epoch: the KL limit stopped updates of a shared network.",
    ),
    "policy_stopped_at": Metric(
        "minibatch",
        "Minibatch at which the KL limit stopped the policy's part of the update; absent when it did not.",
        "Small in most updates: data is wasted; lower the learning rate.",
    ),
    "staleness": Metric(
        "updates",
        "Mean age, in updates, of the weights that collected this experience; 0 for synchronous collection.",
        "Always at the limit: the learner is slower, and more staleness gains nothing; lower max_staleness.",
    ),
    "staleness_max": Metric(
        "updates",
        "Largest age of the weights behind any step of this update; at most max_staleness.",
        "Far above 1 while returns fall behind a synchronous run: lower max_staleness.",
    ),
    "foreign_steps": Metric(
        "0 to 1",
        "Share of steps taken by other weights than those of their version here; absent if there are none.",
        "Above 0: the batch has rollouts of another policy. They are weighted as stale; check their origin.",
    ),
    "behaviour_weight": Metric(
        "–",
        "Mean importance weight of the samples: probability under the current policy over that of the older one.",
        "Far from 1: the policies differ too much; lower max_staleness or the learning rate.",
    ),
    "queue_depth": Metric(
        "segments",
        "Complete segments waiting for the learner.",
        "Always at its limit: learning is the bottleneck. Always 0: collecting is.",
    ),
    "wait_seconds": Metric(
        "s",
        "Time the learner waited for the experience of this update.",
        "Close to collect_seconds: nothing overlaps; see collector_utilisation.",
    ),
    "collector_utilisation": Metric(
        "0 to 1",
        "Share of time the collector collects; otherwise it waits for space in the buffer.",
        "Low: the learner is slower; a larger batch per update or fewer epochs would balance them.",
    ),
    "learner_utilisation": Metric(
        "0 to 1",
        "Share of time the learner learns; otherwise it waits for experience.",
        "Low: collection is slower; first try more environments per inference.",
    ),
    "dropped_steps": Metric(
        "steps",
        "Steps so far that were never learned from: overwritten, too stale, or of an unfinished segment.",
        "Growing steadily: overwrite_oldest discards experience; use block.",
    ),
    "collector_restarts": Metric(
        "–",
        "How often a failed asynchronous collector was restarted.",
        "Above 0: see the warnings of the run; each restart loses an unfinished segment.",
    ),
    "policy_version": Metric(
        "versions",
        "Version of the policy of a screen agent after this update.",
        "Not increasing: nothing is learned; see trajectories_learned and batches_refused.",
    ),
    "trajectories_offered": Metric(
        "episodes",
        "Episodes offered to the learner since the last update.",
        "Far above trajectories_learned: most episodes are discarded; see the shares below.",
    ),
    "trajectories_learned": Metric(
        "episodes",
        "Episodes this update learned from; 0 if there was nothing to learn, so that no weight changed.",
        "Repeatedly 0: all groups have equal rewards, nothing passes the threshold, or batches are refused.",
    ),
    "tokens_learned": Metric(
        "tokens",
        "Sampled tokens this update learned from.",
        "Growing while rewards do not: answers get longer without benefit.",
    ),
    "tokens_per_second": Metric(
        "tokens/s",
        "Tokens learned from per second of learning, including the checks before.",
        "Low: use larger microbatches, if memory allows.",
    ),
    "accepted_share": Metric(
        "0 to 1",
        "Share of offered episodes that the algorithm admitted.",
        "0 in rejection sampling: no episode earned more than reward_threshold; lower it or use an easier task.",
    ),
    "reward_mean": Metric(
        "reward",
        "Mean reward of the offered episodes as used for learning; episode_return is that of the environment.",
        "Flat for long: see zero_variance_share, then entropy.",
    ),
    "zero_variance_share": Metric(
        "0 to 1",
        "Share of groups dropped because all their episodes have the same reward.",
        "Near 1: tasks are too hard or too easy; choose others, larger groups, or replay.fill_groups.",
    ),
    "short_group_share": Metric(
        "0 to 1",
        "Share of groups dropped because fewer than two episodes remained.",
        "Above 0.05: sessions fail; see refused_environment.",
    ),
    "trajectories_refused": Metric(
        "episodes",
        "Episodes refused since the last update because a check failed.",
        "Above refused_environment: the recording is wrong; see the log.",
    ),
    "refused_environment": Metric(
        "episodes",
        "Of those, episodes whose session failed.",
        "Growing: sessions crash or time out; check the gateway.",
    ),
    "refused_empty": Metric(
        "episodes",
        "Of those, episodes without turns or with a turn without tokens.",
        "Above 0: the sampler returned nothing; check the actor.",
    ),
    "refused_version": Metric(
        "episodes",
        "Of those, episodes with tokens without a version, or of a future version.",
        "Above 0: sampler and learner count versions differently, or the run was resumed from an earlier checkpoint.",
    ),
    "refused_log_prob": Metric(
        "episodes",
        "Of those, episodes with a log-probability that is NaN or above 0.",
        "Above 0: the sampler is broken, often by overflow in half precision.",
    ),
    "refused_picture": Metric(
        "episodes",
        "Of those, episodes whose pictures are missing, altered or of unknown size.",
        "Above 0: screenshots are lost between actor and learner.",
    ),
    "refused_reward": Metric(
        "episodes",
        "Of those, episodes with a reward that is not finite, outside the task's range, or contradicts the outcome.",
        "Above 0: the task's verifier is broken, or its reward_range is wrong; see the log.",
    ),
    "refused_weights": Metric(
        "episodes",
        "Of those, episodes of weights that this learner did not publish under their version.",
        "Above 0: the sampler uses other weights; restart it, and check for a second learner.",
    ),
    "refused_temperature": Metric(
        "episodes",
        "Of those, episodes sampled at another temperature than that of this run.",
        "Above 0 after a resume with another actor.temperature: expected once. Otherwise the recording is wrong.",
    ),
    "refused_text": Metric(
        "episodes",
        "Of those, episodes whose tokens do not match their text, or whose text does not match their action.",
        "Above 0: actor and learner have different tokenizers or codecs; see actor.codec.",
    ),
    "refused_group": Metric(
        "episodes",
        "Of those, episodes of groups with different first screens, or with the same episode twice.",
        "Above 0: the first screen of a task is not reproducible; the log names the group. Leave the task out.",
    ),
    "batches_refused": Metric(
        "batches",
        "Batches refused in a row because sampler and learner disagree; at three, training ends.",
        "Above 0: new weights do not reach the sampler, or it sees other images; see the log.",
    ),
    "disagreement": Metric(
        "nats",
        "Mean difference between recorded log-probabilities and those of the weights that sampled the tokens.",
        "Above 0.01 in float32, or growing with every update: the sampler's weights are not the learner's.",
    ),
    "disagreement_max": Metric(
        "nats",
        "Largest difference of a single token.",
        "Above 1 with a small mean: single images or prompts differ.",
    ),
    "unchecked_share": Metric(
        "0 to 1",
        "Share of the update's tokens that were not compared with the weights that sampled them.",
        "Above 0: proof.checked_turns is set, or tokens are older than the versions whose weights are kept.",
    ),
    "behaviour_kl": Metric(
        "nats",
        "KL divergence of the policy before the update from the older policies that sampled the tokens.",
        "Above 0.1: experience is too old; lower the staleness bound or the learning rate.",
    ),
    "behaviour_weight_max": Metric(
        "–",
        "Largest importance weight of a token; at most weight_limit.",
        "At the limit in every update while behaviour_weight_capped grows: experience is too old.",
    ),
    "behaviour_weight_capped": Metric(
        "0 to 1",
        "Share of tokens whose importance weight was clipped at the limit.",
        "Above 0.05: as for behaviour_kl.",
    ),
    "reference_kl": Metric(
        "nats",
        "KL divergence per token from the policy before training.",
        "Growing without bound while rewards do not: raise kl_coef or lower the learning rate.",
    ),
    "advantage_mean": Metric(
        "–",
        "Mean advantage over the turns of the update.",
        "Far from 0 in GRPO: long episodes are systematically worse or better; inspect them.",
    ),
    "replay_share": Metric(
        "0 to 1",
        "Share of learned episodes that are stored successes of earlier versions.",
        "Above one half: the policy imitates its past; lower replay.share or replay.max_age.",
    ),
    "reward_scale": Metric(
        "–",
        "Factor by which rewards were multiplied for learning; recorded rewards are not scaled.",
        "Varying by orders of magnitude: reward sizes are not stationary; use a fixed scale.",
    ),
    "success_rate": Metric(
        "0 to 1",
        "Share of the last hundred training episodes that solved the task, if the environment reports is_success.",
        "Flat while returns grow: the reward does not measure the task.",
    ),
    "eval_success_rate": Metric(
        "0 to 1",
        "Share of evaluation episodes that solved the task.",
        "Well below success_rate: the policy relies on exploration noise, or does not generalise.",
    ),
    "eval_return": Metric(
        "reward",
        "Mean return of evaluation episodes, acting without exploration noise.",
        "Below episode_return: the policy relies on exploration noise, or normalisation differs.",
    ),
    "eval_return_std": Metric(
        "reward",
        "Standard deviation of the returns of evaluation episodes.",
        "As large as the mean: too few episodes to compare two checkpoints; evaluate more.",
    ),
    "eval_length": Metric(
        "steps",
        "Mean length of evaluation episodes.",
        "At the time limit while returns are low: the policy waits instead of acting.",
    ),
    "episodes_per_second": Metric(
        "episodes/s",
        "Screen episodes per second since the last update, including learning.",
        "Low while inference_utilisation is low: sessions are the bottleneck; use more servers or actors.",
    ),
    "inference_utilisation": Metric(
        "share",
        "Share of time since the last update in which the sampler generated.",
        "Near 1: generation is the bottleneck; use a larger batch, a smaller model or inference.backend=process.",
    ),
    "environment_failures": Metric(
        "episodes",
        "Sessions that failed since the last update; each was retried, and none became a reward.",
        "More than a few percent: see the reasons in the trajectories and the log of the gateway.",
    ),
    "unreadable_share": Metric(
        "share",
        "Share of replies that could not be parsed as an action.",
        "Above a few percent: the model does not know this grammar; check actor.codec, or lower the temperature.",
    ),
    "truncated_share": Metric(
        "share",
        "Share of episodes that ended at a step limit.",
        "High while success is low: the model makes no progress; raise the limit only if it does.",
    ),
    "sampler_restarts": Metric(
        "–",
        "How often a dead sampler process was restarted, with inference.backend=process.",
        "Above 0: see the warnings of the run; a killed process usually ran out of memory.",
    ),
    "dropped_stale": Metric(
        "episodes",
        "Episodes since the last update that were dropped because they exceeded max_staleness.",
        "Often above 0: some episodes are much longer than others; raise max_staleness.",
    ),
}

_HEAD = """\
# Metrics

Every update reports these numbers under these names, in the journal (`metrics.jsonl`), in TensorBoard and in
W&B.

Read them together. Healthy PPO shows `episode_return` rising, `explained_variance` climbing towards 1,
`entropy` falling slowly, and `approx_kl` steady around 0.01.
When returns stall, check the critic first (`explained_variance`), then at the size of the steps
(`approx_kl`, `clip_fraction`), then at exploration (`entropy`).
When returns fall after a peak and `approx_kl` jumped just before, the steps were too large: lower the
learning rate and resume from the best checkpoint.

| metric | unit | meaning | bad values, and what to do |
| --- | --- | --- | --- |
"""


def render_metrics_page() -> str:
    """The reference page of all metrics, as Markdown."""
    rows = [f"| `{name}` | {metric.unit} | {metric.meaning} | {metric.bad} |" for name, metric in METRICS.items()]
    return _HEAD + "\n".join(rows) + "\n"
