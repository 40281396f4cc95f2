"""What every metric of a `TrainingStep` means, in one table that is also the reference page.

Owns names, units and advice; computes nothing and refuses nothing, since a trainer of somebody else's may
report metrics of its own. The learner and the trainer use the names, the docs build drives
`render_metrics_page`, and the studio shows the same sentences as tooltips.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["METRICS", "Metric", "render_metrics_page"]


class Metric(NamedTuple):
    """One metric: its unit, what it says, and what a bad value means and asks for."""

    unit: str
    meaning: str
    bad: str


METRICS: dict[str, Metric] = {
    "env_step": Metric(
        "steps",
        "Environment steps taken so far, over all environments; the x axis of every curve.",
        "Standing still means that collection is stuck; look at the environment.",
    ),
    "update": Metric(
        "updates",
        "Times the learner has run on a batch of experience.",
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
        "Mean undiscounted return of recent episodes, as the environment paid it; the number to raise.",
        "Flat for long, or falling after a peak: see how to read them together, above.",
    ),
    "episode_return_min": Metric(
        "reward",
        "Lowest return among the same episodes.",
        "Far below the mean: the policy fails on some starts; look at those episodes.",
    ),
    "episode_return_max": Metric(
        "reward",
        "Highest return among the same episodes.",
        "Never above the mean of a random policy: exploration does not reach the reward.",
    ),
    "episode_length": Metric(
        "steps",
        "Mean length of recent episodes.",
        "Pinned at the time limit, or only a few steps, where the task asks for neither: it is not solved.",
    ),
    "loss": Metric(
        "–",
        "What the optimiser minimised: policy loss, value loss and entropy bonus, weighted and added.",
        "Its level says little, and it need not fall; NaN stops the run and names where it came from.",
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
        "How undecided the policy is; it falls as the policy commits itself.",
        "Near its floor while returns are poor: it committed too early; raise the entropy coefficient.",
    ),
    "approx_kl": Metric(
        "nats",
        "Estimated distance between the policy that acted and the policy after the update.",
        "Above about 0.03: steps are too large; lower the learning rate or the epochs, or set a KL limit.",
    ),
    "clip_fraction": Metric(
        "share",
        "Share of samples whose probability ratio left the clip range and so stopped pushing.",
        "Above about 0.3: as for approx_kl. Always 0: the update is too timid; raise the learning rate.",
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
        "Half-width of the interval around ratio 1 in which a sample still pushes.",
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
        "Near 0 with poor returns: the policy is stuck; look at entropy and advantage_std.",
    ),
    "critic_grad_norm": Metric(
        "–",
        "Norm of the value function's part of the gradient before clipping.",
        "Dwarfs actor_grad_norm in a shared network: lower the value coefficient or scale rewards.",
    ),
    "value_mean": Metric(
        "reward",
        "Mean value estimate over the batch.",
        "Drifting away from return_mean: the critic lags behind or diverges.",
    ),
    "return_mean": Metric(
        "reward",
        "Mean of the discounted returns that the value function was trained towards.",
        "Exploding: discount too close to 1 for these rewards, or rewards that need scaling.",
    ),
    "advantage_std": Metric(
        "reward",
        "Spread of the advantages before normalisation: how much signal the batch carries.",
        "Near 0: every action looks alike, and normalising only blows up noise; look at the reward.",
    ),
    "minibatches": Metric(
        "minibatches",
        "Gradient steps this update took, over all epochs.",
        "Well below epochs times minibatches per epoch: the KL limit stopped a network that is shared.",
    ),
    "policy_stopped_at": Metric(
        "minibatch",
        "Minibatch at which the KL limit stopped the policy's part of the update; absent when it did not.",
        "Small on most updates: lower the learning rate, or data is being thrown away.",
    ),
    "staleness": Metric(
        "updates",
        "How many updates old the weights were that collected this experience, on average; 0 when taking turns.",
        "At the bound all the time: the learner is the slower side; more staleness buys nothing, lower max_staleness.",
    ),
    "staleness_max": Metric(
        "updates",
        "The oldest weights behind any step of this update; in the background never above max_staleness.",
        "Far above 1 while returns fall behind a synchronous run: lower max_staleness.",
    ),
    "foreign_steps": Metric(
        "0 to 1",
        "Share of steps that other weights took than those their version stands for here; absent when there are none.",
        "Above 0: rollouts of another policy are in the batch. They are weighed as stale; check where they come from.",
    ),
    "behaviour_weight": Metric(
        "–",
        "Mean weight of this update's samples: how much likelier today's policy is to act as the older one did.",
        "Far from 1: the two policies differ much; lower max_staleness or the learning rate.",
    ),
    "queue_depth": Metric(
        "segments",
        "Whole segments that wait behind the one being learned from.",
        "Always at its limit: learning is the bottleneck. Always 0: collecting is.",
    ),
    "wait_seconds": Metric(
        "s",
        "How long the learner waited for this update's experience.",
        "Close to collect_seconds: nothing overlaps; see collector_utilisation.",
    ),
    "collector_utilisation": Metric(
        "0 to 1",
        "Part of the collector's time spent collecting; the rest it waited for room.",
        "Low: the learner is slower; a larger batch per update or fewer epochs would balance them.",
    ),
    "learner_utilisation": Metric(
        "0 to 1",
        "Part of the learner's time spent learning; the rest it waited for experience.",
        "Low: acting is slower; more environments per inference is the first remedy.",
    ),
    "dropped_steps": Metric(
        "steps",
        "Steps taken and never learned from, so far: overwritten, too stale, or of a segment that was not finished.",
        "Growing steadily: overwrite_oldest throws work away; use block.",
    ),
    "collector_restarts": Metric(
        "–",
        "How often a background collector that failed was replaced.",
        "Above 0: read the warnings of the run; each restart loses an unfinished segment.",
    ),
    "policy_version": Metric(
        "versions",
        "The version the policy of a screen agent has after this update; its tokens carry it from now on.",
        "Standing still: nothing is learned from; see trajectories_learned and batches_refused.",
    ),
    "trajectories_offered": Metric(
        "episodes",
        "Episodes offered to the learner since the last update.",
        "Far above trajectories_learned: most of the sampling is thrown away; see the shares below.",
    ),
    "trajectories_learned": Metric(
        "episodes",
        "Episodes this update learned from; 0 when there was nothing to learn, and then no weight changed.",
        "0 again and again: every group is alike, nothing passes the threshold, or batches are refused.",
    ),
    "tokens_learned": Metric(
        "tokens",
        "Sampled tokens this update learned from.",
        "Growing while rewards do not: answers get longer for nothing.",
    ),
    "tokens_per_second": Metric(
        "tokens/s",
        "Tokens learned from per second of learning, the look beforehand included.",
        "Low: larger microbatches, if memory allows.",
    ),
    "accepted_share": Metric(
        "0 to 1",
        "Share of offered episodes that the algorithm admitted.",
        "0 in rejection sampling: no episode earned more than reward_threshold; lower it or use an easier task.",
    ),
    "reward_mean": Metric(
        "reward",
        "Mean of what the offered episodes earn for learning; episode_return is what the environment paid.",
        "Flat for long: see zero_variance_share, then entropy.",
    ),
    "zero_variance_share": Metric(
        "0 to 1",
        "Share of groups dropped because all their episodes earned the same.",
        "Near 1: tasks are too hard or too easy; choose others, larger groups, or replay.fill_groups.",
    ),
    "short_group_share": Metric(
        "0 to 1",
        "Share of groups dropped because fewer than two episodes were left.",
        "Above 0.05: sessions break; look at refused_environment.",
    ),
    "trajectories_refused": Metric(
        "episodes",
        "Episodes refused since the last update because something about them is not proven.",
        "Above refused_environment: something is wrong with the recording; the log names each.",
    ),
    "refused_environment": Metric(
        "episodes",
        "Of those, episodes whose screen broke.",
        "Growing: sessions crash or time out; look at the gateway.",
    ),
    "refused_empty": Metric(
        "episodes",
        "Of those, episodes without turns or with a turn without tokens.",
        "Above 0: the sampler returned nothing; look at the actor.",
    ),
    "refused_version": Metric(
        "episodes",
        "Of those, episodes with tokens of no version, or of one that does not exist yet.",
        "Above 0: sampler and learner count versions apart, or the run was resumed from an earlier checkpoint.",
    ),
    "refused_log_prob": Metric(
        "episodes",
        "Of those, episodes with a log-probability that is no number or above 0.",
        "Above 0: the sampler is broken, often by overflow in half precision.",
    ),
    "refused_picture": Metric(
        "episodes",
        "Of those, episodes whose pictures are missing, altered or of unknown size.",
        "Above 0: screenshots are lost between actor and learner.",
    ),
    "refused_reward": Metric(
        "episodes",
        "Of those, episodes with a reward that is not finite, not one the task pays, or not one of their outcome.",
        "Above 0: the task's verifier is broken, or its reward_range is wrong; the log says more.",
    ),
    "refused_weights": Metric(
        "episodes",
        "Of those, episodes drawn from weights that this learner did not publish under the version they name.",
        "Above 0: the sampler runs on other weights; restart it, and look for a second learner.",
    ),
    "refused_temperature": Metric(
        "episodes",
        "Of those, episodes sampled at another temperature than this run samples at.",
        "Above 0 after a resume with another actor.temperature: expected once. Otherwise the recording is wrong.",
    ),
    "refused_text": Metric(
        "episodes",
        "Of those, episodes whose tokens do not say their text, or whose text does not say their action.",
        "Above 0: actor and learner have different tokenizers or codecs; see actor.codec.",
    ),
    "refused_group": Metric(
        "episodes",
        "Of those, episodes of groups that did not begin on one screen, or that contain an episode twice.",
        "Above 0: the first screen of a task is not repeatable; the log names the group, leave the task out.",
    ),
    "batches_refused": Metric(
        "batches",
        "Batches refused in a row because sampler and learner disagree; at three, training ends.",
        "Above 0: new weights do not reach the sampler, or it sees other pictures; the log says more.",
    ),
    "disagreement": Metric(
        "nats",
        "Mean distance between recorded log-probabilities and those of the weights that drew the tokens.",
        "Above 0.01 in float32, or growing with every update: the sampler's weights are not the learner's.",
    ),
    "disagreement_max": Metric(
        "nats",
        "The same for the token with the largest distance.",
        "Above 1 with a small mean: single pictures or prompts differ.",
    ),
    "unchecked_share": Metric(
        "0 to 1",
        "Share of the update's tokens that were not compared with the weights that drew them.",
        "Above 0: proof.checked_turns is set, or tokens are older than the versions whose weights are kept.",
    ),
    "behaviour_kl": Metric(
        "nats",
        "Distance of the policy before the update from the older ones that sampled its tokens.",
        "Above 0.1: experience is too old; lower the staleness bound or the learning rate.",
    ),
    "behaviour_weight_max": Metric(
        "–",
        "Largest weight of a token of older weights; at most weight_limit.",
        "At the limit in every update while behaviour_weight_capped grows: experience is too old.",
    ),
    "behaviour_weight_capped": Metric(
        "0 to 1",
        "Share of tokens whose weight was held at the limit.",
        "Above 0.05: as for behaviour_kl.",
    ),
    "reference_kl": Metric(
        "nats",
        "Distance per token from the policy as it was before training.",
        "Growing without bound while rewards do not: raise kl_coef or lower the learning rate.",
    ),
    "advantage_mean": Metric(
        "–",
        "Mean advantage over the turns of the update.",
        "Far from 0 in GRPO: long episodes do systematically worse or better; look at them.",
    ),
    "replay_share": Metric(
        "0 to 1",
        "Share of the learned episodes that are stored successes of earlier versions.",
        "Above one half: the policy imitates its past; lower replay.share or replay.max_age.",
    ),
    "reward_scale": Metric(
        "–",
        "Factor by which rewards were multiplied for learning; the recorded rewards stay as they were paid.",
        "Swinging by orders of magnitude: reward sizes are not stationary; use a fixed scale.",
    ),
    "success_rate": Metric(
        "0 to 1",
        "Share of the last hundred training episodes that solved the task, where the environment tells (is_success).",
        "Flat while returns grow: the reward pays for something other than the task.",
    ),
    "eval_success_rate": Metric(
        "0 to 1",
        "Share of the evaluation's episodes that solved the task.",
        "Well below success_rate: the policy needs its noise, or saw the evaluation's scenes too rarely.",
    ),
    "eval_return": Metric(
        "reward",
        "Mean return of evaluation episodes, acting without exploration noise.",
        "Below episode_return: the policy relies on its noise, or normalisation differs.",
    ),
    "eval_return_std": Metric(
        "reward",
        "Spread of the returns of those evaluation episodes.",
        "As large as the mean: too few episodes to compare two checkpoints; evaluate more.",
    ),
    "eval_length": Metric(
        "steps",
        "Mean length of evaluation episodes.",
        "At the time limit while returns are low: the policy waits instead of acting.",
    ),
    "episodes_per_second": Metric(
        "episodes/s",
        "Episodes on screens played per second since the last update, learning included.",
        "Low while inference_utilisation is low: sessions are the bottleneck; use more servers or actors.",
    ),
    "inference_utilisation": Metric(
        "share",
        "Part of the time since the last update in which the sampler was answering.",
        "Near 1: answers are the bottleneck; use a larger batch, a smaller model or inference.backend=process.",
    ),
    "environment_failures": Metric(
        "episodes",
        "Sessions that broke since the last update; each was tried again and none became a reward.",
        "More than a few in a hundred: look at the reasons in the trajectories and at the gateway's log.",
    ),
    "unreadable_share": Metric(
        "share",
        "Part of the replies that could not be read as an action.",
        "Above a few percent: the model does not speak this grammar; see actor.codec and a lower temperature.",
    ),
    "truncated_share": Metric(
        "share",
        "Part of the episodes that ended at a step limit.",
        "High while success is low: the model wanders; raise the limit only if it is on its way.",
    ),
    "sampler_restarts": Metric(
        "–",
        "How often a sampler process that died was replaced, with inference.backend=process.",
        "Above 0: read the warnings of the run; a process that was killed usually ran out of memory.",
    ),
    "dropped_stale": Metric(
        "episodes",
        "Episodes since the last update that came later than max_staleness allows and were dropped.",
        "Often above 0: some episodes are much longer than others; raise max_staleness.",
    ),
}

_HEAD = """\
# Metrics

Every update reports these numbers under these names, in the journal (`metrics.jsonl`), in TensorBoard and in
W&B.

Read them together. Healthy PPO shows `episode_return` rising, `explained_variance` climbing towards 1,
`entropy` falling slowly, and `approx_kl` steady around 0.01.
When returns stall, look at the critic first (`explained_variance`), then at the size of the steps
(`approx_kl`, `clip_fraction`), then at exploration (`entropy`).
When returns fall after a peak and `approx_kl` jumped just before, the steps were too large: lower the
learning rate and resume from the best checkpoint.

| metric | unit | what it says | a bad value, and what to do |
| --- | --- | --- | --- |
"""


def render_metrics_page() -> str:
    """The reference page of all metrics, as Markdown."""
    rows = [f"| `{name}` | {metric.unit} | {metric.meaning} | {metric.bad} |" for name, metric in METRICS.items()]
    return _HEAD + "\n".join(rows) + "\n"
