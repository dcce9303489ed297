"""Names of data sets in the paper's server, and their environments."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from prorl_envs.config import ServerSettings
from prorl_envs.env.registry import environments
from prorl_envs.errors import InputError
from prorl_envs.model.types import Sampling
from prorl_envs.rollout.api.batches import BatchRequest
from prorl_envs.rollout.api.types import AgentLimits, GroupRequest, Result, Timings, Trajectory
from prorl_envs.rollout.http.app import create_app
from prorl_envs.rollout.http.routes.paper import SOURCES, environment_of

pytestmark = pytest.mark.anyio

PAGE = (Path(__file__).parents[3] / "docs" / "paper-clients.md").read_text(encoding="utf-8")
#: The fields that the page names, by their model.
FIELDS: dict[type[BaseModel], tuple[str, ...]] = {
    GroupRequest: ("id", "environment", "task", "samples", "metadata"),
    Sampling: ("temperature", "top_p", "max_tokens", "seed"),
    AgentLimits: ("max_turns", "init_s", "run_s", "eval_s"),
    BatchRequest: ("min_rewards", "priority"),
    Result: ("job_id", "state", "sample", "reward", "mask_sample", "evidence", "trajectory", "forks"),
    Trajectory: ("ids", "loss_mask", "logprobs"),
    Timings: ("init_s", "run_s", "eval_s"),
}
OFFERED = frozenset(environments())


@pytest.mark.parametrize(
    ("environment", "names"),
    [
        ("math", ("math", "deepscaler", "deepscaler/aime", "numina_olympiads", "aime2025", "openai/gsm8k")),
        ("code", ("code", "deepcoder", "deepcoder/lcbv5", "apps", "codecontests", "codeforces", "taco")),
        (
            "swebench",
            ("swebench", "swegym", "swe-gym", "SWE-Gym/SWE-Gym", "r2egym", "R2E-Gym/R2E-Gym-Subset"),
        ),
        ("swebench", ("swe-bench", "princeton-nlp/SWE-bench_Verified", "SWE-bench/SWE-bench_Lite")),
    ],
)
def test_the_reference_names_map_to_environments(environment: str, names: tuple[str, ...]) -> None:
    assert {name: environment_of(name, OFFERED, {}) for name in names} == dict.fromkeys(names, environment)


def test_every_name_maps_to_a_built_in_environment() -> None:
    assert set(SOURCES.values()) <= OFFERED
    assert not set(SOURCES) & OFFERED, "the name of an environment needs no entry"


def test_the_page_lists_every_name() -> None:
    rows = re.findall(r"^\| (\w+) \| (.+) \|$", PAGE.partition("## Data sources")[2], re.MULTILINE)
    listed = {name: row for row, names in rows if row in OFFERED for name in re.findall("`(.+?)`", names)}
    assert listed == SOURCES


async def test_routes_and_fields_to_which_the_page_maps_others_exist(bench: Any) -> None:
    routes = {
        f"{method.upper()} {re.sub('{.+?}', '{}', path)}"
        for path, methods in create_app(bench.service, ServerSettings()).openapi()["paths"].items()
        for method in methods
    }
    mapped = re.findall(r"`((?:GET|POST|DELETE) /v1/[^`?]+)`", PAGE)
    assert len(mapped) > 8
    assert {re.sub("{.+?}", "{}", route) for route in mapped} <= routes
    for model, fields in FIELDS.items():
        assert set(fields) <= set(model.model_fields), model
        for field in fields:
            assert re.search(rf"`(\w+\.)?{field}`", PAGE), field


def test_offered_names_take_precedence_over_the_operators() -> None:
    further = {"taco": "bash", "deepcoder*": "bash", "deepcoder/lcb*": "stem", "apps*": "stem"}

    def resolved(name: str) -> str:
        return environment_of(name, {*OFFERED, "codeforces"}, further)

    assert resolved("codeforces") == "codeforces"
    assert resolved("taco") == "bash"
    assert resolved("deepcoder") == resolved("deepcoder/train") == "bash"
    assert resolved("deepcoder/lcbv5") == "stem", "the longest pattern"
    assert resolved("apps") == "stem"
    assert resolved("codecontests") == "code"


def test_an_unknown_name_maps_to_itself_if_it_is_offered() -> None:
    for name in ("browsergym", "tacos", "Deepscaler", "*"):
        assert environment_of(name, OFFERED, {}) == name
    with pytest.raises(
        InputError, match="'deepscaler' stands for environment 'math', which is not available"
    ):
        environment_of("deepscaler", {"bash"}, {})
