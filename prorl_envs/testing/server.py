"""Scripted model server: the token protocol of vLLM over HTTP on a loopback port."""

import contextlib
from collections.abc import Callable
from typing import Any, Self

from fastapi import FastAPI

from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.http.server import answering
from prorl_envs.testing.scripted import ScriptBook, ScriptedCounts
from prorl_envs.testing.scripted_app import ScriptedOptions, ScriptedService, add_common, add_vllm
from prorl_envs.testing.tokenizer import builtin_renderer

type Interface = Callable[[FastAPI, ScriptedService], None]
"""Function that adds the routes of a kind of server, such as `add_vllm`."""


def scripted_app(service: ScriptedService, interface: Interface = add_vllm) -> FastAPI:
    """Create the ASGI application of a scripted model server."""
    app = FastAPI(title="Scripted model server", docs_url=None, redoc_url=None, openapi_url=None)
    add_common(app, service)
    interface(app, service)
    return app


class ScriptedServer:
    """Scripted model server in this process on a loopback port.

    An async context manager: the server listens at `url` inside the block, and stops at the end of the block.

    Args:
        book: scripts of the known tasks; by default there are none.
        interface: interface of the server.
        port: TCP port; 0 selects a free port.
        renderer: tokenizer and template of the simulated model; by default the built-in ones.
        service: makes the implementation of the routes.
        options: the fields of `ScriptedOptions`.
    """

    def __init__(
        self,
        book: ScriptBook | None = None,
        *,
        interface: Interface = add_vllm,
        port: int = 0,
        renderer: TemplateRenderer | None = None,
        service: Callable[..., ScriptedService] = ScriptedService,
        **options: Any,
    ) -> None:
        self._service = service(
            renderer or builtin_renderer(), book or ScriptBook({}), ScriptedOptions(**options)
        )
        self._interface = interface
        self._port = port
        self._stack = contextlib.AsyncExitStack()
        self.url = ""

    @property
    def counts(self) -> ScriptedCounts:
        """Current counters."""
        return self._service.counts

    async def __aenter__(self) -> Self:
        app = scripted_app(self._service, self._interface)
        # Errors are not logged, because aborted answers are part of the script.
        serving = answering(app, port=self._port, last_requests_s=1, log_level="critical")
        self.url = await self._stack.enter_async_context(serving)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()
