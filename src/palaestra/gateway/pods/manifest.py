"""The pod manifests of the session types: read, checked before anything starts, and completed for one session.

A manifest defines image, resources, probe and security of a session type. The gateway sets name, labels, owner,
deadline and restart policy.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from palaestra.errors import ConfigError
from palaestra.gateway.config import KubernetesConfig

DEFAULT_TYPE = "browser"
"""The session type of the manifest that comes with Palaestra."""

_NEEDED = {"requests": ("cpu", "memory"), "limits": ("memory",)}


@dataclass(frozen=True)
class SessionManifest:
    """The manifest of one session type."""

    session_type: str
    place: str
    """The file, for error messages."""
    document: Mapping[str, Any]
    port: int
    """Port of the session."""


def read_manifests(config: KubernetesConfig) -> dict[str, SessionManifest]:
    """One manifest per session type; `ConfigError` names the file and the invalid field."""
    if not config.manifests:
        text = files("palaestra.gateway.pods").joinpath("browser.yaml").read_text()
        document = yaml.safe_load(text)
        if config.image is not None:
            document["spec"]["containers"][0]["image"] = config.image
        return {DEFAULT_TYPE: check_manifest(document, DEFAULT_TYPE, "browser.yaml", config)}
    if config.image is not None:
        reason = "only applies to the manifest that comes with Palaestra"
        raise ConfigError("gateway.kubernetes.image", config.image, reason, "Name the image in your manifests")
    return {name: _read_file(name, path, config) for name, path in config.manifests.items()}


def _read_file(session_type: str, path: Path, config: KubernetesConfig) -> SessionManifest:
    place = f"gateway.kubernetes.manifests.{session_type}"
    try:
        documents = [document for document in yaml.safe_load_all(path.read_text()) if document is not None]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(place, str(path), f"cannot be read ({error})") from None
    except yaml.YAMLError as error:
        raise ConfigError(place, str(path), f"is not YAML ({' '.join(str(error).split())})") from None
    if len(documents) != 1:
        raise ConfigError(place, str(path), f"holds {len(documents)} documents", "Write one Pod per file")
    return check_manifest(documents[0], session_type, str(path), config)


def check_manifest(document: object, session_type: str, place: str, config: KubernetesConfig) -> SessionManifest:
    """The manifest of a document; `ConfigError` for the first field that is missing or invalid."""
    if not isinstance(document, dict) or document.get("kind") != "Pod" or document.get("apiVersion") != "v1":
        kind = document.get("kind") if isinstance(document, dict) else type(document).__name__
        raise ConfigError(f"{place}: kind", kind, "is not a Pod", "Write apiVersion: v1, kind: Pod")
    spec = _mapping(document, "spec", place)
    containers = spec.get("containers")
    if (
        not isinstance(containers, list)
        or not containers
        or not all(isinstance(container, dict) for container in containers)
    ):
        raise ConfigError(f"{place}: spec.containers", containers, "holds no container", "The first is the session")
    for number, container in enumerate(containers):
        _check_container(container, f"{place}: spec.containers[{number}]")
    if not containers[0].get("readinessProbe"):
        reason, remedy = (
            "without it the gateway cannot know when a session is ready",
            "Probe /health: httpGet: {path: /health}",
        )
        raise ConfigError(f"{place}: spec.containers[0].readinessProbe", None, reason, remedy)
    if spec.get("restartPolicy", "Never") != "Never":
        reason = "a session that ended must not restart"
        raise ConfigError(f"{place}: spec.restartPolicy", spec["restartPolicy"], reason, "Leave it out")
    deadline = spec.get("activeDeadlineSeconds", config.lifetime_s)
    if not isinstance(deadline, int) or isinstance(deadline, bool) or deadline < 1:
        raise ConfigError(f"{place}: spec.activeDeadlineSeconds", deadline, "is not a number of seconds of at least 1")
    metadata = _mapping(document, "metadata", place, absent={})
    _mapping(metadata, "labels", f"{place}: metadata", absent={})
    namespace = metadata.get("namespace", config.namespace)
    if namespace != config.namespace:
        reason = f"the gateway creates pods in {config.namespace!r}"
        raise ConfigError(f"{place}: metadata.namespace", namespace, reason, "Set gateway.kubernetes.namespace")
    return SessionManifest(session_type, place, document, _read_port(containers[0], place, config.port))


def _mapping(
    document: Mapping[str, Any], key: str, place: str, *, absent: dict[str, Any] | None = None
) -> dict[str, Any]:
    value = document.get(key, absent)
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: {key}", value, "is not a mapping")
    return value


def _check_container(container: Mapping[str, Any], place: str) -> None:
    for key in ("name", "image"):
        if not isinstance(container.get(key), str):
            raise ConfigError(f"{place}.{key}", container.get(key), "required and not given")
    resources = _mapping(container, "resources", place, absent={})
    for kind, names in _NEEDED.items():
        given = _mapping(resources, kind, f"{place}.resources", absent={})
        for name in names:
            if name not in given:
                reason = "without it one session can starve a node and everything on it"
                raise ConfigError(f"{place}.resources.{kind}.{name}", None, reason, f"Set {kind}: {{{name}: …}}")


def _read_port(container: Mapping[str, Any], place: str, default: int) -> int:
    ports = container.get("ports") or []
    if not ports:
        return default
    port = ports[0].get("containerPort") if isinstance(ports, list) and isinstance(ports[0], dict) else ports
    if not isinstance(port, int) or not 0 < port < 65536:
        raise ConfigError(f"{place}: spec.containers[0].ports[0].containerPort", port, "is not a port")
    return port


def build_pod(
    manifest: SessionManifest, *, name: str, labels: Mapping[str, str], owner: Mapping[str, str], lifetime_s: int
) -> dict[str, Any]:
    """The pod document of one session."""
    document = copy.deepcopy(dict(manifest.document))
    metadata = document.setdefault("metadata", {})
    for key in ("generateName", "uid", "resourceVersion"):
        metadata.pop(key, None)
    metadata["name"] = name
    metadata["labels"] = {**metadata.get("labels", {}), **labels}
    # Neither a controller nor blocking: the reference only makes the cluster delete the pod with its owner.
    metadata["ownerReferences"] = [dict(owner)]
    spec = document["spec"]
    spec["restartPolicy"] = "Never"
    spec["activeDeadlineSeconds"] = min(lifetime_s, spec.get("activeDeadlineSeconds", lifetime_s))
    spec["automountServiceAccountToken"] = False
    spec["enableServiceLinks"] = False
    spec.setdefault("terminationGracePeriodSeconds", 0)
    return document
