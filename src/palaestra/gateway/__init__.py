"""The HTTP server that creates, leases, proxies and reaps UI sessions. Never imports torch.

`serve_gateway` runs one. `Runtime` is the interface to what runs its sessions, on this machine or in a cluster, and
`check_runtime` tests an implementation of it.
"""

from palaestra.gateway.config import GatewayConfig
from palaestra.gateway.conformance import check_runtime
from palaestra.gateway.runtime import Address, Runtime

__all__ = ["Address", "GatewayConfig", "Runtime", "check_runtime", "serve_gateway"]


def serve_gateway(config: GatewayConfig) -> None:
    """Serve sessions until SIGTERM or SIGINT and print the URL; `ConfigError` when the gateway cannot start."""
    from palaestra.extras import GATEWAY, require_extras

    require_extras("the gateway", "ui", only=GATEWAY)
    from palaestra.gateway.serving import serve

    serve(config)
