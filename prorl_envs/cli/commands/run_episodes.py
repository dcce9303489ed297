"""`prorl-envs run`: episodes of one environment, on a new service or on a running service."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prorl_envs.app.compose import connect, request_defaults
from prorl_envs.app.service import rollout_service
from prorl_envs.catalog import Catalog
from prorl_envs.cli.output.console import err, print_by_reason
from prorl_envs.cli.output.run_groups import run_groups
from prorl_envs.cli.run_folders import RUN_NAME, check_folder, create_folder, latest_folder
from prorl_envs.config import Settings
from prorl_envs.env.audit.record import AuditRecord
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
        environment: name of the environment, or `NAME@AGENT`.
        data: file of task rows; None means the environment's examples.
        tasks: ids of the tasks to run; if empty, all.
        limit: maximum tasks; None means no limit.
        samples: episodes per task.
        sampling, limits: as set on the command line.
        folder: folder for the results; None means a new folder named by time, or with `resume` the latest.
        require_audit: record of an audit; tasks that did not pass it are left out.
        resume: continue the run in `folder`.
        retry_failed: with `resume`, run failed samples again.
        loggers: loggers of the metrics, with their names.
    """

    environment: str
    data: Path | None = None
    tasks: Sequence[str] = ()
    limit: int | None = None
    samples: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    limits: AgentLimits = field(default_factory=AgentLimits)
    folder: Path | None = None
    require_audit: Path | None = None
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


def rows(
    catalog: Catalog, options: RunOptions, bases: Mapping[str, Path] | None
) -> list[tuple[dict[str, Any], str]]:
    """Return the rows to run, each with the id of its task.

    Raises:
        InputError: no such environment or task, a row is wrong, or there is no row that may run.
    """
    loaded = catalog.rows(options.environment, options.data)
    if not loaded:
        raise InputError(f"{catalog.data(options.environment, options.data)} contains no task")
    if unknown := set(options.tasks) - {task.id for _, task in loaded}:
        missing = min(unknown)
        hint = name_hint(missing, (task.id for _, task in loaded))
        raise InputError(f"no task has the id {missing!r}", hint=hint)
    chosen = [(row, task) for row, task in loaded if not options.tasks or task.id in options.tasks]
    if options.require_audit is not None:
        record, family = AuditRecord(options.require_audit, bases), catalog.family(options.environment)
        refused = {task.id: reason for _, task in chosen if (reason := record.refusal(family, task))}
        print_by_reason("left out", refused.items(), style="yellow")
        chosen = [(row, task) for row, task in chosen if task.id not in refused]
        if not chosen:
            raise InputError(f"no task passed the audit in {options.require_audit}")
    return [(row, task.id) for row, task in chosen[: options.limit]]


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
    """Join parts to an id.

    Characters that ids cannot have are replaced by `-`. If that changes the id, or if it is too long and is
    cut, a hash of the parts is appended, so that different parts give different ids.
    """
    text = "/".join(parts)
    allowed = _NOT_IN_IDS.sub("-", "/".join(part.strip("/") for part in parts))
    if allowed == text and len(text) <= _LONGEST_ID:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{allowed[: _LONGEST_ID - len(digest) - 1].rstrip('/')}-{digest}"


def open_folder(
    chosen: Sequence[tuple[dict[str, Any], str]], options: RunOptions, settings: Settings | None, model: str
) -> RunFolder:
    """Open the folder for the results, new or resumed. The caller closes it.

    Args:
        chosen: the rows to run.
        options: options of the run.
        settings: settings of the service that is started for the run, whose defaults are stored with the
            groups; None for a running service.
        model: name of the model; "" if unknown.

    Raises:
        InputError: the folder has results and `resume` is not set, or has no results and `resume` is set, or
            cannot be written.
    """
    if options.resume:
        path = options.folder or latest_folder()
        groups = _with_defaults(requests(chosen, options, read_description(path).name), settings)
        return RunFolder.resume(path, groups, model, retry_failed=options.retry_failed)
    started = datetime.now(UTC)
    name = started.strftime(RUN_NAME)
    groups = _with_defaults(requests(chosen, options, name), settings)
    return create_folder(options.folder, started, options.environment, model, groups)


def _with_defaults(groups: Sequence[GroupRequest], settings: Settings | None) -> list[GroupRequest]:
    """Return the groups, with unset sampling and limits taken from the service's settings."""
    defaults = request_defaults(settings) if settings is not None else {}
    return [
        defaults[group.environment].applied(group) if group.environment in defaults else group
        for group in groups
    ]


def _session() -> str:
    return f"r{datetime.now(UTC):%Y%m%d%H%M%S}"


async def on_service(options: RunOptions, settings: Settings, url: str, token: str | None) -> None:
    """Run on a running service. If the run stops early, unfinished groups are cancelled."""
    chosen = rows(Catalog.of(settings), options, None)
    async with RolloutClient(url, token=token) as client:
        with open_folder(chosen, options, None, "") as folder:
            if options.resume:
                await _collect(client, folder)
            submitted = submissions(folder, _session() if options.resume else "")
            try:
                await run_groups(client, folder, submitted, tables=True, loggers=options.loggers)
            except BaseException:
                for submission in submitted:
                    with suppress(NotFound):
                        await client.cancel_group(submission.request.id)
                raise


async def _collect(client: RolloutClient, folder: RunFolder) -> None:
    """Fetch results of groups that a client submitted before it was killed; wait for their running jobs."""
    for group, missing in folder.missing():
        with suppress(NotFound):
            for job in (await client.group(group.id)).jobs:
                if job.sample in missing:
                    await _take(client, folder, job)


async def _take(client: RolloutClient, folder: RunFolder, job: JobView) -> None:
    while not job.state.final:
        err.print(f"waiting for {job.id}, which the service is still running", soft_wrap=True)
        job = await client.job(job.id, wait_s=20.0)
    with suppress(NotFound):  # the result expired, so the sample is run again
        folder.append(await client.result(job.id))


async def run_here(
    options: RunOptions,
    settings: Settings,
    *,
    llm: Sequence[str],
    tokenizer: str | None,
    name: str | None,
    api_key: str | None,
) -> None:
    """Run on a service that is started for this run."""
    catalog = Catalog.of(settings)
    chosen = rows(catalog, options, settings.images.bases)
    if obstacle := catalog.family(options.environment).driver_obstacle(settings.driver):
        raise InputError(obstacle, hint="`prorl-envs doctor` shows what this machine lacks")
    if not options.resume:
        check_folder(options.folder)
    if not llm:
        raise InputError("no model server is named", hint="use --llm http://host:8000/v1, or --service URL")
    model = await connect(llm, settings.model, tokenizer=tokenizer, name=name, api_key=api_key)
    async with (
        rollout_service(settings, model) as service,
        serving(service) as url,
        RolloutClient(url) as client,
    ):
        # The folder is created last, so that a machine that cannot start sandboxes leaves no empty folder.
        with open_folder(chosen, options, settings, model.name or "") as folder:
            submitted = submissions(folder, _session() if options.resume else "")
            await run_groups(client, folder, submitted, tables=True, loggers=options.loggers)
