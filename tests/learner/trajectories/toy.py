"""A tiny policy over twelve tokens that samples, scores and learns for real, and the game it plays.

The game: the prompt ends in a number 0 to 9, and the right first word of the answer is the number 3 further on. An
answer is one to `LONGEST` tokens and ends with END.
"""

import copy
import hashlib

import numpy as np
import torch
from torch import nn

from palaestra.experience.trajectory import Outcome, Trajectory, Turn
from palaestra.experience.turn_scoring import TokenLogProbs

VOCABULARY, NUMBERS, END, BEGIN = 12, 10, 10, 11
LONGEST = 3
PICTURE = b"a toy screen"
SHA = hashlib.sha256(PICTURE).hexdigest()
PICTURES = {SHA: PICTURE}


class TablePolicy(nn.Module):
    """Logits of a token from the token before it; a value from the last token of the prompt."""

    def __init__(self, seed=0, scale=0.3):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(scale * torch.randn(VOCABULARY, VOCABULARY, generator=generator))
        self.worth = nn.Linear(VOCABULARY, 1)
        nn.init.zeros_(self.worth.weight)
        nn.init.zeros_(self.worth.bias)
        self.before = self.table.detach().clone()
        self.version = 0
        self.calls = []

    def log_probs(self, turns, *, with_values=False, with_entropy=False, grad=True):
        self.calls.append((len(turns), grad))
        with torch.set_grad_enabled(grad):
            log_probs, mask, every = self._scored(self.table, turns)
            entropy = values = None
            if with_entropy:
                entropy = -(every.exp() * every).sum(-1) * mask
            if with_values:
                last = torch.tensor([int(each.turn.prompt_ids[-1]) for each in turns])
                values = self.worth(nn.functional.one_hot(last, VOCABULARY).float()).squeeze(1)
            return TokenLogProbs(log_probs, mask, entropy, values)

    def reference_log_probs(self, turns):
        with torch.no_grad():
            return self._scored(self.before, turns)[0]

    def trainable_parameters(self):
        return list(self.parameters())

    def _scored(self, table, turns):
        longest = max(len(each.turn.token_ids) for each in turns)
        tokens = np.zeros((len(turns), longest), np.int64)
        previous, mask = tokens.copy(), np.zeros((len(turns), longest), bool)
        for row, each in enumerate(turns):
            count = len(each.turn.token_ids)
            tokens[row, :count], mask[row, :count] = each.turn.token_ids, True
            previous[row, 0], previous[row, 1:count] = each.turn.prompt_ids[-1], each.turn.token_ids[:-1]
        tokens, previous, mask = torch.from_numpy(tokens), torch.from_numpy(previous), torch.from_numpy(mask)
        heat = torch.tensor([each.temperature for each in turns])[:, None, None]
        every = torch.log_softmax(table[previous] / heat, dim=-1)
        return every.gather(-1, tokens[..., None]).squeeze(-1) * mask, mask, every

    def spoken(self, temperature=1.0):
        """Log-probabilities of each token after each other, as the sampler knows them: `[VOCABULARY, VOCABULARY]`."""
        with torch.no_grad():
            return torch.log_softmax(self.table / temperature, dim=-1).numpy()


def answer(spoken, number, rng):
    """Sampled token ids with their log-probabilities."""
    tokens, log_probs, previous = [], [], number
    while len(tokens) < LONGEST and previous != END:
        edges = np.cumsum(np.exp(spoken[previous]))
        previous, before = min(int(np.searchsorted(edges, rng.random() * edges[-1])), VOCABULARY - 1), previous
        tokens.append(previous)
        log_probs.append(float(spoken[before, previous]))
    return tokens, log_probs


def turn(number=1, tokens=(4, END), log_probs=None, version=0, reward=0.0, **more):
    facts = {
        "pictures": (SHA,), "image_sizes": ((32, 32),), "prompt_ids": [BEGIN, number], "token_ids": list(tokens),
        "log_probs": list(log_probs) if log_probs is not None else [-0.5] * len(tokens),
        "versions": [version] * len(tokens), "text": " ".join(map(str, tokens)), "reward": reward,
        "action": {"kind": "say"},
    }  # fmt: skip
    return Turn(**(facts | more))


def episode(*turns, name="e", seed=7, outcome=None, **more):
    turns = turns or (turn(),)
    if outcome is None:
        outcome = Outcome.SUCCESS if sum(each.reward for each in turns) > 0 else Outcome.FAILURE
    facts = {
        "episode_id": name, "task": {"task": "toy/add", "seed": seed, "params": {}}, "turns": turns,
        "outcome": outcome, "pictures": PICTURES,
    }  # fmt: skip
    return Trajectory(**(facts | more))


def play(policy, rng, *, seed=0, name="e", group="", length=2, temperature=1.0, version=None, miss=Outcome.FAILURE):
    """One episode: `length` prompts that follow from the seed, one answer to each."""
    version = policy.version if version is None else version
    turns, spoken = [], policy.spoken(temperature)
    for step in range(length):
        number = (seed + 5 * step) % NUMBERS
        tokens, log_probs = answer(spoken, number, rng)
        right = tokens[0] == (number + 3) % NUMBERS
        turns.append(turn(number, tokens, log_probs, version, reward=float(right) / length))
    won = sum(each.reward for each in turns) > 0.99
    return episode(
        *turns, name=name, seed=seed, group=group, temperature=temperature,
        outcome=Outcome.SUCCESS if won else miss,
    )  # fmt: skip


def paid(episodes):
    """What the environment paid, turn by turn."""
    return [np.array([each.reward for each in one.turns], np.float64) for one in episodes]


def skill(policy):
    """Probability of the right first word, averaged over the numbers."""
    with torch.no_grad():
        table = torch.softmax(policy.table, dim=-1)
    return float(np.mean([float(table[n, (n + 3) % NUMBERS]) for n in range(NUMBERS)]))


def twin(policy):
    """The same weights in memory of their own."""
    return copy.deepcopy(policy)
