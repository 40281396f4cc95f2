"""Sessions as pods of a Kubernetes cluster: one fresh pod per session. Never imports torch.

`runtime` carries them, `KubernetesConfig` says how. Only `api` imports the official client, and only when a cluster is
asked for.
"""

from palaestra.gateway.pods.config import KubernetesConfig

__all__ = ["KubernetesConfig"]
