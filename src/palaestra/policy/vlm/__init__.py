"""Hugging Face vision-language models as policies: prompts, sampling, log-probabilities, adapters, checkpoints.

transformers and PEFT are imported when a model is loaded, not before.
"""

from palaestra.policy.vlm.config import ModelConfig
from palaestra.policy.vlm.generation import Completion, SampleRequest
from palaestra.policy.vlm.picture import Picture
from palaestra.policy.vlm.policy import VLMPolicy
from palaestra.policy.vlm.prompt import Conversation, PastTurn, Prompt
from palaestra.policy.vlm.scoring import turn_input

__all__ = [
    "Completion",
    "Conversation",
    "ModelConfig",
    "PastTurn",
    "Picture",
    "Prompt",
    "SampleRequest",
    "VLMPolicy",
    "turn_input",
]
