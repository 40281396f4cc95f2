"""The HTTP server that creates, leases, proxies and reaps UI sessions. Never imports torch.

`serve_gateway` runs one; `Runtime` is what carries its sessions, on this machine or in a cluster, and `check_runtime`
tries whether it keeps its promises.
"""

from palaestra.gateway.config import GatewayConfig
from palaestra.gateway.conformance import check_runtime
from palaestra.gateway.entry import serve_gateway
from palaestra.gateway.runtime import Address, Runtime

__all__ = ["Address", "GatewayConfig", "Runtime", "check_runtime", "serve_gateway"]
