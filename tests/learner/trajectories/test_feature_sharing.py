"""While the vision tower is frozen, sampler, proof and learner encode each picture once between them."""

from tests.learner.trajectories.played import SIZE, build_policy, play_groups

from palaestra.learner.trajectories import GRPO, TrajectoryLearner, UpdateConfig
from palaestra.learner.trajectories.proof import ProofConfig


def test_a_picture_goes_through_the_tower_once_from_sampling_to_the_last_epoch(monkeypatch):
    policy = build_policy()
    model = type(policy.learner.model.base_model)
    encode, encoded = model.get_image_features, []

    def count_pictures(self, pixels, grid, **settings):
        encoded.append(len(grid))
        return encode(self, pixels, grid, **settings)

    monkeypatch.setattr(model, "get_image_features", count_pictures)
    config = UpdateConfig(learning_rate=1e-3, microbatch_turns=SIZE, epochs=2, minibatches=2)
    proof = ProofConfig()
    learner = TrajectoryLearner(policy, GRPO(group_size=SIZE), config, proof=proof, temperature=1.0)
    seen = set()
    for seeds in ((0, 2), (0, 3)):  # the second round meets a first screen again, with other weights
        groups = play_groups(policy, seeds)
        seen |= {
            (sha, size)
            for group in groups
            for trajectory in group
            for turn in trajectory.turns
            for sha, size in zip(turn.pictures, turn.image_sizes, strict=True)
        }
        sampled = sum(encoded)
        assert sampled == len(seen)
        metrics = learner.update([trajectory for group in groups for trajectory in group])
        assert metrics["minibatches"] == 4
        assert sum(encoded) == sampled, "proof and learning use the features of the sampler"
