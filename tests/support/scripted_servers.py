"""Scripted model servers with the interface of each kind of model server."""

from functools import partial
from typing import Any

from prorl_envs.testing.scripted import ScriptBook
from tests.support.generate_face import add_generate
from tests.support.llamacpp_face import add_llamacpp
from tests.support.sglang_face import add_sglang
from tests.support.timed_server import TimedServer

#: Options of `TimedServer` by kind of server.
KINDS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm-scale-out": {"interface": add_generate},
    "sglang": {"interface": add_sglang, "owner": "sglang"},
    "sglang-incremental": {"interface": partial(add_sglang, incremental=True), "owner": "sglang"},
    "llamacpp": {"interface": add_llamacpp, "owner": "llamacpp"},
}


def scripted_server(kind: str, book: ScriptBook, **options: Any) -> TimedServer:
    """Return a server of a kind; the options are those of `TimedServer`."""
    return TimedServer(book, **KINDS[kind], **options)
