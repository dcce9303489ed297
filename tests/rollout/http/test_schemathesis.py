"""Valid and invalid requests generated from the service's OpenAPI document: no answer is a 500, and all
answers are documented."""

import asyncio
from collections import Counter
from typing import Any, cast

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from prorl_envs.config import ServerSettings, ServiceSettings
from prorl_envs.model.routing.pool import ModelPool
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.rollout.http.server import serving
from prorl_envs.rollout.service.service import RolloutService
from tests.support.toy import ToyModel, ToyWorld, empty_node

pytestmark = [pytest.mark.anyio, pytest.mark.thorough, pytest.mark.timeout(300)]

#: Number of requests for each operation. They are the same in every run.
EXAMPLES = 8
TASK: dict[str, Any] = {"id": "t", "instruction": "do"}
BATCH: dict[str, Any] = {"groups": 1, "environment": "toy", "tasks": [{"task": TASK}], "stream_open": True}
KNOWN = {"group_id": "g", "job_id": "g/0", "episode_id": "e", "batch_id": "b", "name": "node"}
SERVER = "http://127.0.0.1:1"
BODY = {"job_id": "j", "address": SERVER}
#: Checks of every answer against the document.
CONFORMANCE = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    allow_header_conformance,
]
GENERATED = schemathesis.GenerationMode


def make_sense(case: Any) -> None:
    """Replace ids, environments and rows by existing ones, which the document does not contain."""
    for name in case.path_parameters or {}:
        case.path_parameters[name] = KNOWN[name]
    for body in case.body if isinstance(case.body, list) else [case.body]:
        if isinstance(body, dict) and "groups" in body:
            body |= {**BATCH, "id": "b", "carry_from": None}
        elif isinstance(body, dict) and "first" in body:
            body |= {"first": 1, "tasks": []}
        elif isinstance(body, dict) and {"turns", "policy"} & set(body):
            body |= {"turns": [1], "policy": None, "samples": 2}
        elif isinstance(body, dict) and "environment" in body:
            body |= {"environment": "toy", "task": TASK}
        elif isinstance(body, dict) and "instance" in body:
            body |= {"instance": {**TASK, "data_source": "toy"}, "sampling_params": {}}
        elif isinstance(body, dict):
            body |= {name: known for name, known in BODY.items() if name in body}
    if case.query and "url" in case.query:
        case.query["url"] = SERVER


def prepare(url: str, session: requests.Session) -> None:
    """Create groups, episodes and batches for requests."""
    session.post(f"{url}/v1/resume").raise_for_status()
    session.post(f"{url}/start")
    session.post(f"{url}/add_llm_server", json={"address": SERVER})
    process: dict[str, Any] = {"instance": {**TASK, "data_source": "toy"}, "job_id": "j"}
    session.post(f"{url}/process", json=process).raise_for_status()
    for kind, name in (("groups", "g"), ("episodes", "e")):
        body: dict[str, Any] = {"id": name, "environment": "toy", "task": TASK}
        session.post(f"{url}/v1/{kind}", json=body).raise_for_status()
    session.post(f"{url}/v1/batches", json={**BATCH, "id": "b"}).raise_for_status()


def check(operation: Any, url: str, session: requests.Session) -> Counter[int]:
    """Send valid and invalid requests to one operation.

    Returns:
        how often each status was answered.
    """
    answered: Counter[int] = Counter()
    right, wrong = (operation.as_strategy(generation_mode=mode) for mode in GENERATED)

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(right | wrong, st.sampled_from([True, True, False]))
    def send(case: Any, sensible: bool) -> None:
        if sensible:
            make_sense(case)
        response = session.request(**case.as_transport_kwargs(base_url=url), timeout=60)
        fine = response.status_code < 500 or response.status_code == 503
        assert fine, f"{case.as_curl_command()}: {'' if response.ok else response.text}"
        case.validate_response(response, checks=CONFORMANCE)
        answered[response.status_code] += 1

    send()
    return answered


async def test_no_generated_request_is_answered_with_a_500(renderer: TemplateRenderer) -> None:
    world = ToyWorld()
    pool = ModelPool(lambda _: ToyModel(renderer, lambda *_: [{"tool": "finish", "arguments": {}}]))
    pool.add(SERVER)
    service = RolloutService(
        empty_node(), {"toy": world.family()}, renderer, pool, ServiceSettings(episodes=100)
    )

    def fuzz(url: str) -> dict[str, Counter[int]]:
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        operations = [cast(Any, result).ok() for result in schema.get_all_operations()]
        answers = {}
        with requests.Session() as session:
            for operation in operations:
                prepare(url, session)
                answers[operation.label] = check(operation, url, session)
        return answers

    async with serving(service, ServerSettings(port=0, max_wait_s=0, generate_token=False)) as url:
        answers = await asyncio.to_thread(fuzz, url)
        assert service.status().internal_errors == 0
    assert world.open == 0
    assert len(answers) > 25
    never = {label for label, answered in answers.items() if not answered[200]}
    # Reasons: a finished job; started already; an episode's model needs a calling
    # client; a service of one machine.
    excused = {"GET /v1/jobs/{job_id}/partial", "POST /start"}
    excused.add("POST /v1/episodes/{episode_id}/endpoint")
    excused |= {f"POST /v1/nodes/{{name}}/{what}" for what in ("drain", "resume")}
    assert never <= excused, "nothing was asked of these in earnest"
