"""Resources server for the episodes of a collection."""

from dataclasses import dataclass
from typing import Any

import httpx

from prorl_envs.clock import Clock
from prorl_envs.remote.http import RemoteConnection


@dataclass(slots=True, kw_only=True)
class ResourcesServer:
    """Resources server that the user has started, with the limits of requests.

    Args:
        url: base URL of the server.
        finish_tool: tool whose call finishes an episode; "" if an answer without a call finishes it.
        fail_on_500: True if an internal error of a tool fails the episode. Otherwise the model receives it.
        connect_s: timeout in seconds for connecting.
        seed_s, call_s, verify_s: timeouts in seconds of each kind of request.
        tool_bytes: maximum number of bytes of a tool's answer that the model receives.
    """

    url: str
    finish_tool: str = ""
    fail_on_500: bool = False
    connect_s: float = 10.0
    seed_s: float = 600.0
    call_s: float = 60.0
    verify_s: float = 900.0
    tool_bytes: int = 64 * 1024
    #: Whether the server takes typed seeds; None if it was not asked yet.
    typed: bool | None = None
    _tls: Any = None

    def connection(self, clock: Clock) -> RemoteConnection:
        """Return a connection for one episode."""
        if self._tls is None:
            self._tls = httpx.create_ssl_context(trust_env=False)
        return RemoteConnection(self.url, connect_s=self.connect_s, tls=self._tls, clock=clock)
