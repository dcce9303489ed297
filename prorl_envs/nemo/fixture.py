"""Replay of recorded answers on a resources server in this process, to compare the rewards.

Used by `VERIFIER_FIXTURE` of a server's `app.py`, which NeMo Gym 0.7 exercises, and by the tests in its
folder. An episode is real: a sandbox is started, every tool call of the answer runs in it again, and the
episode is graded. Neither a port nor Ray is needed.
"""

# mypy: disable-error-code="import-not-found,import-untyped"
# NeMo Gym is an optional extra and ships no types.

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf

from prorl_envs.errors import ProrlError
from prorl_envs.nemo.examples import CASES, EXAMPLE, ROLLOUTS, read_jsonl
from prorl_envs.nemo.rows import server_name
from prorl_envs.nemo.server import EnvironmentServer
from prorl_envs.nemo.wire import EnvironmentServerConfig, VerifyRequest
from prorl_envs.tools.types import JsonObject


@dataclass(frozen=True, slots=True)
class FixtureOutcome:
    """Result of replaying one answer.

    Args:
        name: name of the case, or of the rollout's task.
        expected: the reward, or a part of the error's message.
        observed: the reward, or the error's message.
    """

    name: str
    expected: float | str
    observed: float | str

    @property
    def as_expected(self) -> bool:
        if isinstance(self.expected, str):
            return isinstance(self.observed, str) and self.expected in self.observed
        return self.observed == self.expected


def verifier_fixture(environment: str, app: str) -> Any:
    """Return the `VerifierFixture` of a server's folder.

    Args:
        environment: name of the family.
        app: path of the folder's `app.py`; the cases are in `tests/verifier_cases.jsonl` beside it.

    Returns:
        None if this NeMo Gym has no such fixtures (0.4).
    """
    try:
        from nemo_gym.verifier_fixture import VerifierFixture
    except ModuleNotFoundError:
        return None
    return VerifierFixture(
        server_factory=lambda: Replayer(environment),
        request_model=VerifyRequest,
        cases_path=Path(app).parent / CASES,
        reseed=_reseed,
    )


def _reseed(server: object, request: object) -> None:
    """Do nothing: an episode draws no random numbers, and each replay seeds a new session."""


class Replayer:
    """Scorer of recorded answers. It starts a server for each answer."""

    def __init__(self, environment: str) -> None:
        self._environment = environment

    async def verify(self, request: VerifyRequest) -> JsonObject:
        """Repeat the tool calls of an answer in a new episode, and grade it.

        Args:
            request: a NeMo Gym row with the `response` to replay.

        Returns:
            the verify response.

        Raises:
            ProrlError: the server refused a request, or has no reward.
        """
        async with _serving(self._environment) as server:
            answer = await _replay(server, request)
        return _verdict(answer)  # not inside the block, where an error would become an exception group


def recorded_outcomes(environment: str, folder: Path) -> list[FixtureOutcome]:
    """Replay the answers in `tests/verifier_cases.jsonl` and `data/example_rollouts.jsonl`, and compare each
    reward or error with the recorded one.

    Args:
        environment: name of the family.
        folder: folder of its NeMo Gym server.
    """
    rows = read_jsonl(folder / EXAMPLE)
    cases = [
        (
            case["name"],
            case["expected_error"] if "expected_error" in case else case["expected_reward"],
            case["request"],
        )
        for case in read_jsonl(folder / CASES)
    ]
    rollouts = [
        (
            rollout["task_id"],
            rollout["reward"],
            rows[rollout["_ng_task_index"]] | {"response": rollout["response"]},
        )
        for rollout in read_jsonl(folder / ROLLOUTS)
    ]
    return asyncio.run(_outcomes(environment, [*cases, *rollouts]))


async def _outcomes(
    environment: str, cases: Sequence[tuple[str, float | str, JsonObject]]
) -> list[FixtureOutcome]:
    """Replay cases: for each its name, the expected reward or error, and the request."""
    outcomes = []
    async with _serving(environment) as server:
        for name, expected, request in cases:
            answer = await _replay(server, VerifyRequest.model_validate(request))
            observed = answer.text if answer.is_error else float(answer.json()["reward"])
            outcomes.append(FixtureOutcome(name, expected, observed))
    return outcomes


@asynccontextmanager
async def _serving(environment: str) -> AsyncIterator[httpx.AsyncClient]:
    """Start a server in this process, and yield a client that reaches it without a socket."""
    config = EnvironmentServerConfig(
        name=server_name(environment),
        host="127.0.0.1",
        port=0,
        entrypoint="app.py",
        domain="agent",
        environment=environment,
        failures="error",
    )
    head = BaseServerConfig(host="127.0.0.1", port=0)
    client = ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({}))
    app = EnvironmentServer(config=config, server_client=client).setup_webserver()
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://server", timeout=None
        ) as agent,
    ):
        yield agent


async def _replay(server: httpx.AsyncClient, request: VerifyRequest) -> httpx.Response:
    """Replay one episode, as `simple_agent` drives it. Return the response of `/verify`, or the first
    refusal."""
    server.cookies.clear()
    body = request.model_dump(mode="json")
    seeded = await server.post("/seed_session", json=body)
    if seeded.is_error:
        return seeded
    for item in request.response.output:
        if item.type == "function_call":
            # The response is ignored: the recorded model continued in any case.
            await server.post(f"/{item.name}", content=item.arguments)
    return await server.post("/verify", json=body)


def _verdict(answer: httpx.Response) -> JsonObject:
    if answer.is_error:
        raise ProrlError(f"the server answered {answer.status_code}: {answer.text[:2000]}")
    verdict: JsonObject = answer.json()
    return verdict
