"""`prorl-envs run`: episodes of one environment, on a service of its own or on a running one."""

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prorl_envs.app.compose import connect, request_defaults, rollout_service
from prorl_envs.catalog import Catalog
from prorl_envs.cli.output.console import err
from prorl_envs.cli.output.run_groups import run_groups
from prorl_envs.cli.run_folders import RUN_NAME, check_folder, create_folder, latest_folder
from prorl_envs.config import Settings
from prorl_envs.errors import InputError, name_hint
from prorl_envs.loggers.base import RunLogger
from prorl_envs.model.types import Sampling
from prorl_envs.rollout.api.errors import NotFound
from prorl_envs.rollout.api.types import AgentLimits, GroupRequest
from prorl_envs.rollout.api.views import JobView
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.http.server import serving
from prorl_envs.runs.folder import RunFolder, read_description, submissions

_LONGEST_ID = 180
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._:/\-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of a run: tasks, sampling, and the folder for the results.

    Args:
        environment: its name, or `NAME@AGENT`.
        data: rows of the tasks; None takes the environment's examples.
        tasks: ids of the tasks to run; all if empty.
        limit: most tasks; None has no bound.
        samples: episodes per task.
        sampling, limits: as set on the command line.
        folder: for the results; None names one by the time, or for `resume` takes the latest.
        resume: continue the run of that folder; `retry_failed`: run its failed samples again.
        loggers: of its metrics, by name.
    """

    environment: str
    data: Path | None = None
    tasks: Sequence[str] = ()
    limit: int | None = None
    samples: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    limits: AgentLimits = field(default_factory=AgentLimits)
    folder: Path | None = None
    resume: bool = False
    retry_failed: bool = False
    loggers: Sequence[tuple[str, RunLogger]] = ()


def sampling_of(**named: float | None) -> Sampling:
    """Return the sampling set on the command line.

    Raises:
        InputError: a value is out of range.
    """
    try:
        return Sampling.model_validate({name: value for name, value in named.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]).replace("_", "-")
        raise InputError(f"--{option}: {first['msg']}") from error


def rows(catalog: Catalog, options: RunOptions) -> list[tuple[dict[str, Any], str]]:
    """Return the rows to run, each with the id of its task.

    Raises:
        InputError: no such environment or task, a row is wrong, or there is no row.
    """
    found = [(row, task.id) for row, task in catalog.rows(options.environment, options.data)]
    if not found:
        raise InputError(f"{catalog.data(options.environment, options.data)} holds no task")
    if unknown := set(options.tasks) - {task for _, task in found}:
        missing = min(unknown)
        hint = name_hint(missing, (task for _, task in found))
        raise InputError(f"no task has the id {missing!r}", hint=hint)
    chosen = [(row, task) for row, task in found if not options.tasks or task in options.tasks]
    return chosen[: options.limit]


def requests(
    chosen: Sequence[tuple[dict[str, Any], str]], options: RunOptions, name: str
) -> list[GroupRequest]:
    """Return one group for each task. Group ids start with the name of the run."""
    return [
        GroupRequest(
            id=group_id(name, options.environment, task),
            environment=options.environment,
            task=row,
            samples=options.samples,
            sampling=options.sampling,
            limits=options.limits,
        )
        for row, task in chosen
    ]


def group_id(*parts: str) -> str:
    """Join parts to an id. Characters that ids cannot have become `-`; then, or if the id is too long, a hash
    keeps it unique."""
    text = "/".join(parts)
    written = _NOT_IN_IDS.sub("-", "/".join(part.strip("/") for part in parts))
    if written == text and len(text) <= _LONGEST_ID:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{written[: _LONGEST_ID - len(digest) - 1].rstrip('/')}-{digest}"


def open_folder(
    chosen: Sequence[tuple[dict[str, Any], str]], options: RunOptions, settings: Settings | None, model: str
) -> RunFolder:
    """Open the folder for the results, new or resumed. The caller closes it.

    Args:
        chosen: the rows to run.
        options: of the run.
        settings: of the service that is started for the run, so that its defaults are stored with the groups;
            None for a running service.
        model: name of the model; "" if unknown.

    Raises:
        InputError: it has results and `resume` is not set, it has none and `resume` is set, or it cannot be
            written.
    """
    if options.resume:
        path = options.folder or latest_folder()
        groups = _settled(requests(chosen, options, read_description(path).name), settings)
        return RunFolder.resume(path, groups, model, retry_failed=options.retry_failed)
    started = datetime.now(UTC)
    name = started.strftime(RUN_NAME)
    groups = _settled(requests(chosen, options, name), settings)
    return create_folder(options.folder, started, options.environment, model, groups)


def _settled(groups: Sequence[GroupRequest], settings: Settings | None) -> list[GroupRequest]:
    """Return the groups with the sampling and limits that the service's settings fill in."""
    defaults = request_defaults(settings) if settings is not None else {}
    return [
        defaults[group.environment].applied(group) if group.environment in defaults else group
        for group in groups
    ]


def _session() -> str:
    return f"r{datetime.now(UTC):%Y%m%d%H%M%S}"


async def on_service(options: RunOptions, settings: Settings, url: str, token: str | None) -> None:
    """Run on a running service. If this stops early, unfinished groups are cancelled."""
    chosen = rows(Catalog.of(settings), options)
    async with RolloutClient(url, token=token) as client:
        with open_folder(chosen, options, None, "") as folder:
            if options.resume:
                await _collect(client, folder)
            submitted = submissions(folder, _session() if options.resume else "")
            try:
                await run_groups(client, folder, submitted, tables=True, loggers=options.loggers)
            except BaseException:
                for one in submitted:
                    with suppress(NotFound):
                        await client.cancel_group(one.request.id)
                raise


async def _collect(client: RolloutClient, folder: RunFolder) -> None:
    """Fetch the samples that the service finished, or still works on, after an earlier client was killed."""
    for group, missing in folder.missing():
        with suppress(NotFound):
            for job in (await client.group(group.id)).jobs:
                if job.sample in missing:
                    await _take(client, folder, job)


async def _take(client: RolloutClient, folder: RunFolder, job: JobView) -> None:
    while not job.state.final:
        err.print(f"waiting for {job.id}, which the service still works on", soft_wrap=True)
        job = await client.job(job.id, wait_s=20.0)
    with suppress(NotFound):  # its result expired: the sample is run again
        folder.append(await client.result(job.id))


async def here(
    options: RunOptions,
    settings: Settings,
    *,
    llm: Sequence[str],
    tokenizer: str | None,
    name: str | None,
    api_key: str | None,
) -> None:
    """Run on a service started for this run alone."""
    catalog = Catalog.of(settings)
    chosen = rows(catalog, options)
    if obstacle := catalog.family(options.environment).driver_obstacle(settings.driver):
        raise InputError(obstacle, hint="`prorl-envs doctor` shows what this machine lacks")
    if not options.resume:
        check_folder(options.folder)
    if not llm:
        raise InputError("no model server is named", hint="--llm http://host:8000/v1, or --service URL")
    model = await connect(
        llm,
        tokenizer=tokenizer,
        name=name,
        api_key=api_key,
        protocol=settings.model.protocol,
        tool_format=settings.model.tool_format,
        ca_file=settings.model.ca_file,
    )
    async with (
        rollout_service(settings, model) as service,
        serving(service) as url,
        RolloutClient(url) as client,
    ):
        # Only now: a machine that cannot start sandboxes leaves no empty folder.
        with open_folder(chosen, options, settings, model.name or "") as folder:
            submitted = submissions(folder, _session() if options.resume else "")
            await run_groups(client, folder, submitted, tables=True, loggers=options.loggers)
