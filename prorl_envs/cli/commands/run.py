"""Command `prorl-envs run`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prorl_envs.cli.options import (
    ConfigOption,
    DataOption,
    EnvironmentArgument,
    LlmOption,
    ModelOption,
    OutOption,
    TokenizerOption,
    api_key,
    settings_of,
)
from prorl_envs.errors import InputError

if TYPE_CHECKING:
    from prorl_envs.config import Settings


def run(
    environment: EnvironmentArgument,
    llm: LlmOption = None,
    tokenizer: TokenizerOption = None,
    model: ModelOption = None,
    data: DataOption = None,
    task: Annotated[list[str] | None, typer.Option(help="Id of a task to run. Repeatable.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of tasks.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Episodes per task.")] = 1,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Episodes at a time.  [default: the setting service.run]")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="[default: the environment's, else 1]")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="[default: the environment's, else 1]")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum tokens of a turn.  [default: the environment's, else 2048]"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Sampling seed; sample N of a task is sampled with SEED+N.")
    ] = None,
    max_turns: Annotated[
        int | None, typer.Option(min=1, help="Maximum model calls.  [default: the environment's, else 30]")
    ] = None,
    require_audit: Annotated[
        Path | None,
        typer.Option(help="Record of an audit; tasks that did not pass it are left out."),
    ] = None,
    out_dir: OutOption = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the run in --out, or the latest run: run missing samples."),
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="With --resume: also run failed samples again.")
    ] = False,
    log: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE,...]",
            help="Report metrics to wandb, mlflow or tensorboard, such as wandb:project=x. Repeatable.",
        ),
    ] = None,
    service: Annotated[str | None, typer.Option(help="URL of a running rollout service.")] = None,
    config: ConfigOption = None,
) -> None:
    """Run episodes of an environment with your model, here or on a running service."""
    from prorl_envs.cli.commands import run_episodes as runs
    from prorl_envs.cli.run_loop import run as run_coroutine
    from prorl_envs.loggers.registry import logger_of
    from prorl_envs.rollout.api.types import AgentLimits

    if retry_failed and not resume:
        raise InputError("--retry-failed needs --resume", hint="add --resume")
    options = runs.RunOptions(
        environment=environment,
        data=data,
        tasks=task or (),
        limit=limit,
        require_audit=require_audit,
        samples=samples,
        sampling=runs.sampling_of(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed),
        limits=AgentLimits() if max_turns is None else AgentLimits(max_turns=max_turns),
        folder=out_dir,
        resume=resume,
        retry_failed=retry_failed,
        loggers=[logger_of(text) for text in log or ()],
    )
    settings = settings_of(config)
    if service is not None:
        if concurrency is not None:
            raise InputError(
                "--concurrency is only for a service that is started for the run",
                hint="the service at --service has its own limits",
            )
        run_coroutine(runs.on_service(options, settings, service, os.environ.get("PRORL_SERVER__TOKEN")))
        return
    run_coroutine(
        runs.run_here(
            options,
            _with_concurrency(settings, concurrency),
            llm=llm or (),
            tokenizer=tokenizer,
            name=model,
            api_key=api_key(),
        )
    )


def _with_concurrency(settings: "Settings", concurrency: int | None) -> "Settings":
    if concurrency is None:
        return settings
    pools = settings.service.model_copy(update={"run": concurrency, "max_jobs_with_sandbox": concurrency})
    return settings.model_copy(update={"service": pools})
