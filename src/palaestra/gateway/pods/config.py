"""What the Kubernetes runtime can be told."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field, field_validator

from palaestra.config import Section

__all__ = ["KubernetesConfig"]

_DNS_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_LABEL_VALUE = r"[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?"


class KubernetesConfig(Section):
    """Where session pods run and what they are made from."""

    namespace: str = Field("palaestra", pattern=_DNS_LABEL, max_length=63)
    """The namespace of the session pods; it must exist."""
    name: str = Field("gateway", pattern=_DNS_LABEL, max_length=40)
    """The gateway's name, on every pod it makes. Two gateways of one name in one namespace remove each other's pods."""
    manifests: dict[str, Path] = Field(default_factory=dict)
    """A file with a pod manifest for each session type. Empty: the manifest that comes with Palaestra, as `browser`."""
    image: str | None = Field(None, min_length=1)
    """The image of the session in the manifest that comes with Palaestra; manifests of your own name theirs."""
    kubeconfig: Path | None = None
    """The file with the way into the cluster. None: the pod's service account, else KUBECONFIG or ~/.kube/config."""
    context: str | None = None
    """Which context of that file; None takes its current one."""
    port: int = Field(8000, ge=1, le=65535)
    """Where the session in a pod answers, unless its manifest names a containerPort."""
    ready_s: float = Field(120.0, gt=0)
    """How long a pod may take from its creation until it is ready, the pull of its image included."""
    unschedulable_s: float = Field(15.0, ge=0)
    """How long a pod may find no node. Longer than a cluster that grows on demand takes to bring one."""
    lifetime_s: int = Field(3600, ge=10)
    """How long a session may live, renewed or not. Also when the pods of a killed gateway end by themselves."""

    @field_validator("manifests")
    @classmethod
    def _types_are_labels(cls, manifests: dict[str, Path]) -> dict[str, Path]:
        for name in manifests:
            if len(name) > 63 or not re.fullmatch(_LABEL_VALUE, name):
                raise ValueError(f"session type {name!r} must be 1 to 63 of letters, digits, '-', '_' and '.'")
        return manifests
