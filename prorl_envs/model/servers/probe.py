"""Probe that reports whether a model server supports token-in/token-out."""

from dataclasses import dataclass
from pathlib import Path

from prorl_envs.errors import ModelError
from prorl_envs.model.answer_checks import ServerUnavailable
from prorl_envs.model.http.client import ClientLimits
from prorl_envs.model.servers.chat import OpenAIChatClient
from prorl_envs.model.servers.detect import Protocol, Servers, split_protocol
from prorl_envs.model.types import ControllableServer, Conversation, Sampling, ServerNews

#: Ids that every model has, and seconds for each answer.
_PROMPT, _TIMEOUT_S = (1, 2, 3), 60.0


@dataclass(frozen=True, slots=True)
class ServerReport:
    """Result of a probe.

    Args:
        url: base URL of the server.
        model: name of the probed model, or "" if it is unknown.
        problem: obstacle to rollouts, or "".
        hint: remedy, or "".
        weight_version: version that the server reports, or "".
        unavailable: True if it cannot be reached, is failing or refuses its routes; it may answer later.
    """

    url: str
    model: str
    problem: str = ""
    hint: str = ""
    weight_version: str = ""
    unavailable: bool = False

    @property
    def ok(self) -> bool:
        return not self.problem


async def probe(
    url: str,
    *,
    protocol: Protocol = "auto",
    model: str | None = None,
    api_key: str | None = None,
    ca_file: Path | None = None,
) -> ServerReport:
    """Request the list of models and one token, and check the answers as a rollout does.

    Args:
        url: base URL, with or without `/v1`; it may name its protocol.
        protocol: protocol of a URL that names none.
        model: model name; None takes the first in the server's list.
        api_key: bearer token, if the server requires one.
        ca_file: see `ModelHttpClient`.

    Raises:
        InputError: the URL is invalid, or the CA file cannot be used.
    """
    limits = ClientLimits(connect_s=5.0, answer_s=_TIMEOUT_S, control_s=_TIMEOUT_S, attempts=1)
    servers = Servers(
        encode=lambda _: [0],
        protocol=protocol,
        model=model,
        options={"api_key": api_key, "ca_file": ca_file, "limits": limits},
    )
    client, base = servers.connect(url), split_protocol(url)[1]
    news = ServerNews()
    one_token = Sampling(max_tokens=1)
    try:
        news = await client.look() if isinstance(client, ControllableServer) else news
        if isinstance(client, OpenAIChatClient):
            hello = Conversation([{"role": "user", "content": "Hello."}], ())
            sampled = await client.chat(hello, one_token, session="probe")
        else:
            sampled = await client.generate(_PROMPT, one_token, session="probe")
    except ModelError as error:
        unavailable = isinstance(error, ServerUnavailable)
        return ServerReport(base, model or news.model, error.message, error.hint, unavailable=unavailable)
    finally:
        await client.aclose()
    return ServerReport(
        base, model or news.model, weight_version=sampled.weight_version or news.weight_version
    )
