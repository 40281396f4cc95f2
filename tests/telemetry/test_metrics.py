from benchmarks.reference import documented_metrics

NAMES = """
steps_per_second collect_seconds learn_seconds env_step update episodes episode_return episode_return_min
episode_return_max episode_length loss policy_loss value_loss entropy approx_kl clip_fraction explained_variance
learning_rate clip_range actor_grad_norm critic_grad_norm grad_norm value_mean return_mean advantage_std minibatches
policy_stopped_at staleness reward_scale eval_return eval_return_std eval_length
staleness_max foreign_steps behaviour_weight queue_depth wait_seconds collector_utilisation learner_utilisation
dropped_steps collector_restarts success_rate eval_success_rate
policy_version trajectories_offered trajectories_learned tokens_learned tokens_per_second accepted_share reward_mean
zero_variance_share short_group_share trajectories_refused refused_environment refused_empty refused_version
refused_log_prob refused_picture refused_reward batches_refused disagreement disagreement_max behaviour_kl
behaviour_weight_max behaviour_weight_capped reference_kl advantage_mean replay_share
episodes_per_second inference_utilisation environment_failures unreadable_share truncated_share dropped_stale
nll token_accuracy refused_source demonstration_nll demonstration_turns demonstration_epochs
sampler_restarts publish_seconds probe_difference prefix_cache_share inference_retries inference_reloads
inference_engines_lost inference_episodes_moved
refused_weights refused_temperature refused_text refused_group unchecked_share
q_mean exploration gradient_steps gradient_steps_per_second replay_size eval_normalized_score
temperature temperature_grad_norm value_network_grad_norm imitation_loss expectile_loss td_error value_max
"""


def test_every_metric_the_trainer_reports_is_explained():
    assert set(documented_metrics()) == set(NAMES.split())


def test_every_explanation_is_one_line_of_sentences_that_fits_a_table():
    for name, (unit, meaning, advice) in documented_metrics().items():
        for text in (meaning, advice):
            assert text.endswith("."), name
            assert "|" not in text, name
        assert unit, name
