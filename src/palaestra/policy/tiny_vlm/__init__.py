"""The tiny built-in vision-language model: its recipe, and the checkpoint that ships with the package.

A real Qwen3-VL of under two million weights. It finds widgets on small screens and writes actions in its family's
grammar. It is weak at tasks, and meant to be improved by reinforcement learning on a CPU.
"""

from palaestra.policy.tiny_vlm.recipe import SHIPPED, Recipe, TrainedModel, train_model, write_model

__all__ = ["SHIPPED", "Recipe", "TrainedModel", "train_model", "write_model"]
