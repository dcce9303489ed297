"""Scripted model servers with the interface of each kind of model server."""

from functools import partial
from typing import Any

from prorl_envs.testing.scripted import ScriptBook
from prorl_envs.testing.scripted_app import OWNER, add_vllm
from prorl_envs.testing.server import Interface, ScriptedServer
from tests.support.generate_face import add_generate
from tests.support.llamacpp_face import add_llamacpp
from tests.support.sglang_face import add_sglang

#: By kind of server, its interface, and the owner of its model.
KINDS: dict[str, tuple[Interface, str]] = {
    "vllm": (add_vllm, OWNER),
    "vllm-scale-out": (add_generate, OWNER),
    "sglang": (add_sglang, "sglang"),
    "sglang-incremental": (partial(add_sglang, incremental=True), "sglang"),
    "llamacpp": (add_llamacpp, "llamacpp"),
}


def scripted_server(kind: str, book: ScriptBook, **options: Any) -> ScriptedServer:
    """Return a server of a kind; the options are those of `ScriptedServer`."""
    interface, owner = KINDS[kind]
    return ScriptedServer(book, interface=interface, owner=owner, **options)
