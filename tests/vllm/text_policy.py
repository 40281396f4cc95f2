"""A language model without pictures as a learner: enough of a policy for `ServerSampler`, with our own scoring."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from palaestra.policy.vlm import ModelConfig, turn_input
from palaestra.policy.vlm.generation import TokenRules
from palaestra.policy.vlm.lora import add_adapters
from palaestra.policy.vlm.network import Network
from palaestra.policy.vlm.picture import LRUCache
from palaestra.policy.vlm.prompt import Prompt
from palaestra.policy.vlm.scoring import score


class TextPolicy:
    """Reads instructions, ignores pictures."""

    def __init__(self, directory, *, lora_rank=8, dtype=torch.float32):
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        torch.manual_seed(0)
        wrapped = add_adapters(model, ModelConfig(name=str(directory), lora_rank=lora_rank))
        model.eval()
        self.learner = Network(model, None, wrapped=wrapped, feature_cache=LRUCache(0))
        ends = frozenset({self.tokenizer.eos_token_id})
        self.rules = TokenRules(ends, tuple(range(len(self.tokenizer), self.learner.vocabulary)), min(ends))

    def prompt(self, conversation):
        messages = [{"role": "user", "content": conversation.instruction}]
        ids = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="np", return_dict=True
        )
        return Prompt(ids["input_ids"][0].astype("int32"), ())

    def text_of(self, token_ids):
        return self.tokenizer.decode([token for token in token_ids if token not in self.rules.ends])

    def weights(self):
        """Copies of the trained weights."""
        return {name: weight.detach().clone() for name, weight in self.learner.trainable().items()}

    def log_probs(self, replies, temperature):
        """The learner's own log-probabilities of the replies' tokens, one list for all."""
        with torch.no_grad():
            scored = self._score(replies, temperature)
        return scored.log_probs[scored.mask].tolist()

    def learn(self, replies, *, steps, learning_rate):
        """Make the replies more likely, as rejection sampling does; returns their mean log-probability each time."""
        optimiser = torch.optim.Adam(self.learner.trainable().values(), learning_rate)
        means = []
        for _ in range(steps):
            scored = self._score(replies, 1.0)
            mean = scored.log_probs[scored.mask].mean()
            optimiser.zero_grad()
            (-mean).backward()
            optimiser.step()
            means.append(float(mean.detach()))
        return means

    def _score(self, replies, temperature):
        turns = [turn_input(one.prompt, one.completion, temperature=temperature) for one in replies]
        return score(self.learner, turns, self.rules)
