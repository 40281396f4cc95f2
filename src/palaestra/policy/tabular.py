"""`TabularPolicy`: the value of every action in every state as a table, for Q-learning and SARSA."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn

from palaestra.errors import ConfigError
from palaestra.policy.actor_critic import TensorObservation
from palaestra.policy.config import PolicyConfig
from palaestra.policy.device import Device
from palaestra.policy.distribution import EpsilonGreedy
from palaestra.policy.off_policy import TransitionPolicy
from palaestra.processes.memory import check_fits_in_memory


class TabularPolicy(TransitionPolicy):
    """Takes the best action of the table. It stays on the CPU: a lookup is faster than the way to a GPU."""

    name = "q_table"
    groups = ()

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        config: PolicyConfig | None = None,
        *,
        normalize_observation: bool = False,
        seed: int = 0,
        device: Device | None = None,
    ) -> None:
        nn.Module.__init__(self)
        if not isinstance(observation_space, spaces.Discrete):
            reason = "a table has a row for each state, and these observations are not numbered states"
            raise ConfigError("env observation space", str(observation_space), reason, "Use dqn or ppo")
        if not isinstance(action_space, spaces.Discrete):
            reason = "a table has a column for each action, and these actions are not numbered"
            raise ConfigError("env action space", str(action_space), reason, "Use sac or ppo")
        self.config = config or PolicyConfig(name=self.name)
        if self.config.kwargs:
            name = next(iter(self.config.kwargs))
            raise ConfigError("policy.kwargs", name, "q_table takes no settings", "Leave policy.kwargs out")
        if normalize_observation:
            raise ConfigError("env.normalize_observation", True, "q_table looks up states", "Leave it out")
        self.observation_space, self.action_space = observation_space, action_space
        states, actions = int(observation_space.n), int(action_space.n)
        check_fits_in_memory(
            "env observation space",
            f"{states:,} states",
            {f"table of {states:,} x {actions:,} values": 8 * states * actions},
            "Use dqn or ppo",
        )
        self.distribution = EpsilonGreedy(actions, int(action_space.start))
        self.table = nn.Parameter(torch.zeros(states, actions, dtype=torch.float64), requires_grad=False)
        self._first_state = int(observation_space.start)

    @property
    def notices(self) -> list[str]:
        """None."""
        return []

    @property
    def array(self) -> NDArray[np.float64]:
        """The table as an array that shares its memory."""
        return self.table.detach().numpy()

    def q_values(self, observation: TensorObservation) -> Tensor:
        """`[B, n]`."""
        assert isinstance(observation, Tensor)
        return self.table[observation.long() - self._first_state]

    def forward(self, observation: TensorObservation) -> tuple[Tensor, Tensor]:
        """Values of the actions, and the largest of them."""
        values = self.q_values(observation)
        return values, values.max(-1).values
