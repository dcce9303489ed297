"""Requirements of all clients for servers with token ids, tested with each face of the scripted server."""

import pytest

from prorl_envs.errors import ModelError
from prorl_envs.model.answer_checks import ProtocolError, ServerUnavailable
from prorl_envs.model.http.client import ClientLimits
from prorl_envs.model.servers.llamacpp import LlamaCppClient
from prorl_envs.model.servers.sglang import SglangClient
from prorl_envs.model.servers.vllm import VllmClient
from prorl_envs.model.types import Sampling
from tests.model.listing import BOOK, PROMPT, talking_to
from tests.support.scripted_servers import scripted_server

type Client = type[VllmClient] | type[SglangClient] | type[LlamaCppClient]

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("client", [VllmClient, SglangClient, LlamaCppClient]),
]


async def test_max_tokens_truncates(client: Client) -> None:
    async with (
        scripted_server(client.protocol, BOOK) as server,
        talking_to(client, server.url) as talking,
    ):
        answer = await talking.generate(PROMPT, Sampling(max_tokens=5), session="s")
        assert (len(answer.ids), answer.finish_reason) == (5, "length")


@pytest.mark.parametrize(
    ("behaviour", "error", "says"),
    [
        ("bad_ids", ProtocolError, "outside the vocabulary"),
        ("short_logprobs", ProtocolError, "log-probabilities for"),
        ("error500", ServerUnavailable, "500"),
        ("disconnect", ServerUnavailable, "broke the connection"),
    ],
)
async def test_misbehaving_servers_become_typed_errors(
    client: Client, behaviour: str, error: type[ModelError], says: str
) -> None:
    limits = ClientLimits(attempts=3, backoff_s=0)
    async with (
        scripted_server(client.protocol, BOOK, mix=behaviour) as server,
        talking_to(client, server.url, limits=limits) as talking,
    ):
        with pytest.raises(error, match=says) as caught:
            await talking.generate(PROMPT, Sampling(), session="s")
        assert server.url in caught.value.message
        assert server.counts.requests == (3 if error is ServerUnavailable else 1)
