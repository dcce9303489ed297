"""`prorl-envs demo`: real rollouts, end to end, on this machine.

Without `--llm`, a scripted model server takes the place of the model. It plays reference solutions, wrong
answers and faults in known proportions, so the demo knows the rewards of every group and checks them.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from pathlib import Path

from prorl_envs.app.compose import Model, request_defaults
from prorl_envs.app.service import rollout_service
from prorl_envs.catalog import Catalog
from prorl_envs.cli.commands.view import write_html
from prorl_envs.cli.output.console import err, out, print_by_reason, program
from prorl_envs.cli.output.run_groups import run_groups
from prorl_envs.cli.run_folders import create_folder
from prorl_envs.config import Settings
from prorl_envs.env.base import Task
from prorl_envs.env.node import default_cache_dir
from prorl_envs.errors import InputError
from prorl_envs.model.tokens.token_texts import token_texts
from prorl_envs.model.types import Sampling
from prorl_envs.rollout.api.types import AgentLimits, GroupRequest, GroupStatistics
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.episode.environments import Defaults
from prorl_envs.rollout.http.server import serving
from prorl_envs.runs.folder import submissions
from prorl_envs.testing.scripted import Behaviour, Mix, Script, ScriptBook
from prorl_envs.testing.server import ScriptedServer
from prorl_envs.testing.tokenizer import builtin_renderer, tokenizer_folder

#: The slow family is first, so that its builds continue while the others run.
FAMILIES = ("swebench", "bash", "ipython")
MIX = "solve=2,wrong=1,malformed=1,loop=1,error500=1"
#: Size of the INIT pool: large, because most of its jobs only wait for an instance that another job builds.
INIT_POOL = 16
#: File of a run folder that shows all its episodes in a browser.
PAGE = "episodes.html"
LIMITS = AgentLimits(max_turns=12, max_tokens=65_536)
#: Reward of each behaviour; 0 for others.
_REWARDS: dict[StrEnum, float | None] = {Behaviour.SOLVE: 1.0, Behaviour.ERROR500: None}


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of the demo.

    Args:
        samples: episodes per task; None means the sum of the counts in `mix`.
        tasks: maximum tasks by family; a family that is not named runs all its examples.
        seed: seed of the order of behaviours and of the log-probabilities.
        mix: proportions of the scripted behaviours.
        families: names of the families.
    """

    samples: int | None = None
    tasks: Mapping[str, int] = field(default_factory=dict)
    seed: int = 0
    mix: Mix = field(default_factory=lambda: Mix.parse(MIX))
    families: Sequence[str] = FAMILIES

    @property
    def group_size(self) -> int:
        return self.samples or sum(self.mix.counts.values())


@dataclass(frozen=True, slots=True)
class Chosen:
    """Task of the demo, with its row."""

    family: str
    row: Mapping[str, object]
    task: Task


def choose(catalog: Catalog, options: DemoOptions, driver: str = "auto") -> list[Chosen]:
    """Return the example tasks that this machine can run; print the others, with the reasons.

    Args:
        catalog: the environments.
        options: options of the demo.
        driver: value of the setting `driver`.

    Raises:
        InputError: a family is unknown, or no task can run here.
    """
    chosen = []
    for name in options.families:
        if options.tasks.get(name) == 0:
            continue
        family, found, left_out = catalog.family(name), list[Chosen](), list[tuple[str, str]]()
        for row, task in catalog.rows(name, None):
            if reason := family.obstacle(task, driver):
                left_out.append((f"{name} {task.id}", reason))
            else:
                found.append(Chosen(name, row, task))
        print_by_reason("left out", left_out, style="yellow")
        chosen += found[: options.tasks.get(name, len(found))]
    if not chosen:
        raise InputError("this machine can run none of the demo's tasks", hint="the reasons are above")
    return chosen


def requests(
    chosen: Sequence[Chosen], options: DemoOptions, defaults: Mapping[str, Defaults]
) -> list[GroupRequest]:
    """Return one group per task. The settings of an environment override the demo's own limits."""
    demo_limits = LIMITS.model_dump(exclude_unset=True)
    limits = {name: AgentLimits(**{**demo_limits, **default.limits}) for name, default in defaults.items()}
    return [
        GroupRequest(
            id=f"demo/{item.family}/{item.task.id}",
            environment=item.family,
            task=dict(item.row),
            samples=options.group_size,
            sampling=Sampling(max_tokens=8192),
            limits=limits.get(item.family, LIMITS),
        )
        for item in chosen
    ]


def script(chosen: Sequence[Chosen]) -> ScriptBook:
    """Return the script of the model: each task's reference solution, keyed by the task's instruction."""
    return ScriptBook(
        {
            item.task.instruction: Script(
                [
                    *([{"tool": call.tool, "arguments": call.arguments}] for call in item.task.reference),
                    *([{"content": answer}] for answer in [item.task.reference_answer] if answer),
                ]
            )
            for item in chosen
        }
    )


def unexpected(groups: Sequence[GroupStatistics], options: DemoOptions) -> list[str]:
    """Return one sentence for each group whose rewards differ from those of the script.

    Behaviours are dealt from a deck with the counts of the mix. If the size of a group is not a multiple of
    the deck's size, its rewards are not known in advance, so nothing is checked.
    """
    deck = sum(options.mix.counts.values())
    if options.group_size % deck:
        return []
    rounds = options.group_size // deck
    expected: Counter[float | None] = Counter()
    for behaviour, count in options.mix.counts.items():
        expected[_REWARDS.get(behaviour, 0.0)] += count * rounds
    problems = []
    for group in groups:
        got = Counter(group.rewards)
        if got != +expected:
            problems.append(f"{group.group_id}: expected {_counts(+expected)}, got {_counts(got)}")
    return problems


def _counts(rewards: Counter[float | None]) -> str:
    parts = ("no reward" if r is None else f"reward {r:g}" for r in rewards)
    return ", ".join(f"{part} x{n}" for part, n in zip(parts, rewards.values(), strict=True))


def scripted_tokenizer(settings: Settings) -> Path:
    """Return a folder with the tokenizer of the scripted model; written on first use.

    Raises:
        InputError: the folder cannot be written.
    """
    cache = settings.cache_dir or default_cache_dir()
    try:
        return tokenizer_folder(cache)
    except OSError as error:
        raise InputError(
            f"the tokenizer cannot be written to {cache}: {error.strerror}",
            hint="set another folder: PRORL_CACHE_DIR",
        ) from error


@asynccontextmanager
async def _scripted(
    settings: Settings, chosen: Sequence[Chosen], options: DemoOptions
) -> AsyncIterator[Model]:
    server = ScriptedServer(script(chosen), mix=options.mix, seed=options.seed, noncanonical=0.05)
    async with server:
        err.print(f"model server:    {server.url}  (scripted: it plays known solutions, it is no model)")
        folder = str(scripted_tokenizer(settings)) if settings.nodes.ray is not None else ""
        yield Model(servers=[server.url], renderer=builtin_renderer(), name="scripted", tokenizer=folder)


async def demo(
    settings: Settings, options: DemoOptions, path: Path | None, model: Model | None = None
) -> bool:
    """Run the demo.

    Args:
        settings: settings of the service; it always uses a free port on loopback.
        options: options of the demo.
        path: folder for the results; None means a new folder named by time.
        model: the user's model; None means the scripted model.

    Returns:
        True if all rewards are those of the script, or with a real model.
    """
    catalog = Catalog.of(settings)
    if settings.environments is not None:
        families = [name for name in options.families if name in catalog]
        options = replace(options, families=families or options.families)
    chosen = await asyncio.to_thread(choose, catalog, options, settings.driver)
    pools = settings.service.model_copy(update={"init": max(INIT_POOL, settings.service.init)})
    settings = settings.model_copy(update={"service": pools})
    groups = requests(chosen, options, request_defaults(settings))
    name = model.name or "" if model else "scripted"
    for server in model.servers if model else ():
        err.print(f"model server:    {server}")
    async with (
        nullcontext(model) if model else _scripted(settings, chosen, options) as behind,
        rollout_service(settings, behind) as service,
        serving(service) as url,
        RolloutClient(url) as client,
    ):
        err.print(f"rollout service: {url}  (documentation: {url}/openapi.json)")
        err.print(f"submitting {len(groups)} groups of {options.group_size} over HTTP\n")
        # The folder is created last, so that a machine that cannot start sandboxes leaves no empty folder.
        with create_folder(path, datetime.now(UTC), "demo", name, groups) as folder:
            await run_groups(client, folder, submissions(folder), tables=False)
        views = [await client.group(group.id) for group in groups]
    page = folder.path / PAGE
    texts = partial(token_texts, behind.renderer.decode)
    await asyncio.to_thread(write_html, str(folder.path), page, texts)
    out.print(f"as one page:  {page.resolve().as_uri()}", soft_wrap=True)
    statistics = [view.statistics for view in views if view.statistics is not None]
    out.print(f"your model:   {program()} demo --llm http://host:8000/v1\n")
    informative = sum(group.informative for group in statistics)
    out.print(f"{informative} of {len(groups)} groups are informative: the rewards of their samples differ.")
    if model is not None:
        return True
    problems = unexpected(statistics, options)
    for problem in problems:
        err.print(f"not as scripted: {problem}", style="red")
    if not problems:
        out.print("The rewards of every group are those of the script.")
    return not problems
