"""How new weights reach the actors: `WeightPublisher`, and the one for actors that share the learner's memory."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

__all__ = ["SameMemory", "WeightPublisher"]

W_contra = TypeVar("W_contra", contravariant=True)


class WeightPublisher(Protocol[W_contra]):
    """Makes weights the ones that act."""

    def publish(self, version: int, weights: W_contra) -> None:
        """Act with these weights, known as `version`, from the next step or reply on.

        `weights` are the learner's own memory: a publisher copies what it keeps. A version that is not newer than the
        last one changes nothing.
        """

    def close(self) -> None:
        """Release what it holds. Harmless when repeated."""


class SameMemory:
    """For actors that read the learner's own weights: every update acts as soon as it is made."""

    def publish(self, version: int, weights: Any) -> None:
        """Nothing has to be copied."""

    def close(self) -> None:
        """Nothing is held."""
