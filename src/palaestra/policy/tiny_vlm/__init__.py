"""The tiny built-in vision-language model: how it is made, and where the one that ships with the package lies.

A real Qwen3-VL of under two million weights. It sees widgets on small screens and speaks the action grammar of its
family; it is weak at tasks, and meant to be made better by reinforcement learning on a processor.
"""

from palaestra.policy.tiny_vlm.recipe import MANIFEST, SHIPPED, Recipe, Taught, read_manifest, teach, write_model

__all__ = ["MANIFEST", "SHIPPED", "Recipe", "Taught", "read_manifest", "teach", "write_model"]
