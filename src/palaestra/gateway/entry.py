"""The door to the gateway for whoever has not installed its web server: says what is missing instead of failing."""

from __future__ import annotations

from palaestra.errors import ConfigError
from palaestra.gateway.config import GatewayConfig

__all__ = ["serve_gateway"]


def serve_gateway(config: GatewayConfig) -> None:
    """Serve sessions until SIGTERM or SIGINT; says on standard error where. `ConfigError` when it cannot begin."""
    try:
        from palaestra.gateway.serving import serve
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("palaestra"):
            raise
        raise ConfigError("gateway", error.name, "is not installed", "pip install 'palaestra[serve]'") from None
    serve(config)
