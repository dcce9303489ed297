"""Says plainly whether a model server speaks token-in/token-out."""

from collections.abc import Sequence
from dataclasses import dataclass

from prorl_envs.errors import ModelError
from prorl_envs.policy.link import ClientLimits
from prorl_envs.policy.servers import Protocol, Servers, split_protocol
from prorl_envs.policy.types import ChatClient, Conversation, Sampling, ServerNews, Steerable


@dataclass(frozen=True, slots=True)
class ServerReport:
    """What a probe found.

    Args:
        url: base URL of the server.
        model: the model that was asked, or "" where none was named.
        problem: what stands in the way of rollouts, or "".
        hint: what to do about it, or "".
        weight_version: version the server names, or "".
    """

    url: str
    model: str
    problem: str = ""
    hint: str = ""
    weight_version: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem


async def probe(
    url: str,
    *,
    protocol: Protocol = "auto",
    model: str | None = None,
    api_key: str | None = None,
    prompt_ids: Sequence[int] = (1, 2, 3),
    vocab_size: int | None = None,
    timeout_s: float = 60.0,
) -> ServerReport:
    """Ask a server for its models and for one token, and check the answer as a rollout would.

    Args:
        url: base URL, with or without `/v1`; it may name its protocol.
        protocol: where the URL names none.
        model: model name; None takes the first the server names.
        api_key: bearer token, if it wants one.
        prompt_ids: a prompt of ids, better from the renderer in use.
        vocab_size: of that renderer; None does not check.
        timeout_s: seconds for each of the requests.

    Raises:
        InputError: the URL is not one.
    """
    limits = ClientLimits(connect_s=min(5.0, timeout_s), answer_s=timeout_s, control_s=timeout_s, attempts=1)
    servers = Servers(
        vocab_size=vocab_size,
        encode=lambda _: [0],
        protocol=protocol,
        model=model,
        options={"api_key": api_key, "limits": limits},
    )
    client, base = servers.connect(url), split_protocol(url)[1]
    news = ServerNews()
    one = Sampling(max_tokens=1)
    try:
        news = await client.look() if isinstance(client, Steerable) else news
        if isinstance(client, ChatClient):
            said = Conversation([{"role": "user", "content": "Hello."}], ())
            sampled = await client.chat(said, one, session="probe")
        else:
            sampled = await client.generate(prompt_ids, one, session="probe")
    except ModelError as error:
        return ServerReport(base, model or news.model, error.message, error.hint)
    finally:
        await client.aclose()
    return ServerReport(
        base, model or news.model, weight_version=sampled.weight_version or news.weight_version
    )
