"""A scripted model that lists the files when asked to, and clients of its servers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from prorl_envs.model.servers.base import TokenClient
from prorl_envs.testing.scripted import ScriptBook
from prorl_envs.testing.tokenizer import builtin_renderer

RENDERER = builtin_renderer()
BOOK = ScriptBook.from_tapes({"List the files.": [[{"tool": "bash", "arguments": {"command": "ls"}}]]})
PROMPT = RENDERER.prompt([{"role": "user", "content": "List the files."}])


@asynccontextmanager
async def talking_to[C: TokenClient](kind: type[C], url: str, **options: Any) -> AsyncIterator[C]:
    """Yield a client of the model's server; close it with the block."""
    client = kind(url, stop_ids=RENDERER.stop_ids, vocab_size=RENDERER.vocab_size, **options)
    try:
        yield client
    finally:
        await client.aclose()
