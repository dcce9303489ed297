"""`prorl-envs`: every command, and the one place where an error becomes an exit status.

Exit status: 0 done; 1 the command ran and its outcome is bad; 2 wrong input or a missing part;
130 interrupted.

Help and completion need little of the package: what does the work is imported by the command that does it.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prorl_envs import __version__
from prorl_envs.cli.check_llm import check_llm
from prorl_envs.cli.console import out, report
from prorl_envs.cli.harness import harness
from prorl_envs.cli.image import image
from prorl_envs.cli.nemo import gym_root, nemo
from prorl_envs.cli.sources import SourceArgument
from prorl_envs.cli.steer import add_commands
from prorl_envs.cli.view import view
from prorl_envs.errors import InputError, ProrlError

if TYPE_CHECKING:
    from prorl_envs.config import Settings

#: What the help lists together.
_ROLLOUTS, _STORED, _ENVIRONMENTS = "Rollouts", "Stored episodes", "Tasks and environments"
_MACHINE, _NEMO = "This machine", "NeMo Gym"

cli = typer.Typer(
    name="prorl-envs",
    help="Agentic RL environments on rootless sandboxes, served as rollouts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        out.print(f"prorl-envs {__version__}")
        raise typer.Exit


@cli.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
    driver: Annotated[
        str | None,
        typer.Option(help="Starts sandboxes: auto, namespaces, bubblewrap, apptainer, instance, local."),
    ] = None,
) -> None:
    if driver is not None:
        os.environ["PRORL_DRIVER"] = driver  # a setting for every command, read with the others


LlmOption = Annotated[
    list[str] | None,
    typer.Option(
        "--llm",
        help="Base URL of a model server (vLLM, SGLang, llama.cpp), such as http://host:8000/v1. Repeatable.",
    ),
]
TokenizerOption = Annotated[
    str | None,
    typer.Option(help="Folder or Hub name of the model's tokenizer; by default the served model's name."),
]
ModelOption = Annotated[str | None, typer.Option("--model", help="Model name, as the server knows it.")]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="YAML file with settings.")]


def _settings(config: Path | None) -> "Settings":
    from prorl_envs.config import load_settings

    return load_settings(config, os.environ)


@cli.command(rich_help_panel=_ROLLOUTS)
def demo(
    llm: LlmOption = None,
    tokenizer: TokenizerOption = None,
    model: ModelOption = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Episodes per task.")] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="Most tasks per family.")] = None,
    swebench: Annotated[int, typer.Option(min=0, help="SWE-bench instances; they are built first.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the script.")] = 0,
    mix: Annotated[str | None, typer.Option(help="Scripted behaviours, such as solve=2,wrong=1.")] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Where the trajectories go.")] = Path("runs/demo"),
    config: ConfigOption = None,
) -> None:
    """Run real rollouts end to end on this machine; by default a scripted model plays known solutions."""
    from prorl_envs.cli.compose import connect
    from prorl_envs.cli.demo import FAMILIES, DemoOptions, demo
    from prorl_envs.cli.running import run
    from prorl_envs.testing.scripted import Mix

    limits = {name: tasks for name in FAMILIES if tasks is not None} | {"swebench": swebench}
    options = DemoOptions(samples=samples, tasks=limits, seed=seed)
    if mix is not None:
        options = replace(options, mix=Mix.parse(mix))

    async def main() -> bool:
        settings = _settings(config)
        given = None
        if llm:
            given = await connect(
                llm,
                tokenizer=tokenizer,
                name=model,
                api_key=_api_key(),
                protocol=settings.model.protocol,
                tool_format=settings.model.tool_format,
            )
        return await demo(settings, options, out_dir, given)

    if not run(main()):
        raise typer.Exit(1)


@cli.command(rich_help_panel=_ROLLOUTS)
def serve(
    llm: LlmOption = None,
    tokenizer: TokenizerOption = None,
    model: ModelOption = None,
    host: Annotated[str | None, typer.Option(help="Address to bind; off loopback a token is needed.")] = None,
    port: Annotated[int | None, typer.Option(help="TCP port; 0 takes a free one.")] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="What keeps jobs and results: a file, postgresql://HOST/DATABASE, or memory, which a "
            "restart forgets.  [default: runs/service.db]"
        ),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Serve rollouts over HTTP until a signal."""
    import asyncio

    from prorl_envs.cli.compose import connect
    from prorl_envs.cli.serving import serve

    settings = _settings(config)
    address = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
    settings = settings.model_copy(update={"server": settings.server.model_copy(update=address)})
    if store is not None:
        service = settings.service.model_validate({**settings.service.model_dump(), "store": store})
        settings = settings.model_copy(update={"service": service})
    servers = llm or list(settings.model.servers)
    folder = tokenizer or (str(settings.model.tokenizer) if settings.model.tokenizer else None)
    if not servers and folder is None:
        raise InputError(
            "no model server is named",
            hint="--llm http://host:8000/v1; or --tokenizer alone, where servers are added later",
        )

    async def main() -> None:
        behind = await connect(
            servers,
            tokenizer=folder,
            name=model or settings.model.name or None,
            api_key=_api_key(),
            protocol=settings.model.protocol,
            tool_format=settings.model.tool_format,
        )
        await serve(settings, behind)

    asyncio.run(main())


@cli.command(rich_help_panel=_ROLLOUTS)
def node(
    head: Annotated[str, typer.Argument(help="HOST:PORT where nodes join: the service's nodes.port.")],
    name: Annotated[str | None, typer.Option(help="Name of this node; by default the host's.")] = None,
    config: ConfigOption = None,
) -> None:
    """Carry out jobs of a rollout service on another machine, until a signal."""
    import asyncio

    from prorl_envs.cli.nodes import serve_node

    asyncio.run(serve_node(_settings(config), head, name))


@cli.command(rich_help_panel=_ROLLOUTS)
def run(
    environment: Annotated[str, typer.Argument(help="Environment family.")],
    llm: LlmOption = None,
    tokenizer: TokenizerOption = None,
    model: ModelOption = None,
    data: Annotated[
        Path | None, typer.Option(help="JSONL of task rows; by default the family's examples.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Episodes per task.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Most tasks.")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="By default the environment's, else 1.")
    ] = None,
    max_turns: Annotated[
        int | None, typer.Option(min=1, help="Most model calls; by default the environment's, else 30.")
    ] = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Where the trajectories go.")] = Path("runs/run"),
    service: Annotated[str | None, typer.Option(help="URL of a running rollout service.")] = None,
    config: ConfigOption = None,
) -> None:
    """Run episodes of a family with your model, here or on a running service."""
    from prorl_envs.catalog import Catalog
    from prorl_envs.cli import run as command
    from prorl_envs.cli.running import run
    from prorl_envs.policy.types import Sampling
    from prorl_envs.rollout.types import AgentLimits

    settings = _settings(config)
    requests = command.requests(
        Catalog.of(settings),
        environment,
        data,
        limit=limit,
        samples=samples,
        sampling=Sampling() if temperature is None else Sampling(temperature=temperature),
        limits=AgentLimits() if max_turns is None else AgentLimits(max_turns=max_turns),
    )
    if service is not None:
        run(command.on_service(service, os.environ.get("PRORL_SERVER__TOKEN"), requests, out_dir))
        return
    if not llm:
        raise InputError("no model server is named", hint="--llm http://host:8000/v1, or --service URL")
    run(command.here(settings, llm, tokenizer, model, _api_key(), requests, out_dir))


@cli.command(rich_help_panel=_ROLLOUTS)
def play(
    environment: Annotated[str, typer.Argument(help="Environment family.")],
    task: Annotated[str | None, typer.Argument(help="Task id; by default the first.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="JSONL of task rows; by default the family's examples.")
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Solve a task yourself: you are the model."""
    from prorl_envs.cli.play import play
    from prorl_envs.cli.running import run

    run(play(_settings(config), environment, task, data))


@cli.command(rich_help_panel=_STORED)
def show(
    source: SourceArgument,
    job: Annotated[str | None, typer.Argument(help="A job id, or the end of one.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: the whole result, or one line for each.")
    ] = False,
) -> None:
    """Show one trajectory as a conversation, or list what is stored."""
    from prorl_envs.cli.show import show

    show(source, job, as_json=as_json)


@cli.command(rich_help_panel=_ENVIRONMENTS)
def validate(
    environment: Annotated[str, typer.Argument(help="Environment family.")],
    data: Annotated[
        Path | None, typer.Argument(help="JSONL or Parquet of task rows; by default the family's examples.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Episodes at a time.")] = 4,
    config: ConfigOption = None,
) -> None:
    """Check a data file without a model: references score 1, untouched workspaces 0, twice the same."""
    from prorl_envs.cli.running import run
    from prorl_envs.cli.validate import validate_file

    if not run(validate_file(_settings(config), environment, data, jobs)):
        raise typer.Exit(1)


@cli.command(rich_help_panel=_STORED)
def replay(
    source: Annotated[
        str, typer.Argument(metavar="FILE", help="A results.jsonl, or a service's store: a file, or its URL.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(help="Task rows; by default those asked for, if they are kept, else the examples."),
    ] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Where the results go with their rewards of today.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Episodes at a time.")] = 4,
    config: ConfigOption = None,
) -> None:
    """Score stored rollouts again with today's graders, without a model, and say what changed."""
    from prorl_envs.cli.replay import replay_file
    from prorl_envs.cli.running import run

    if not run(replay_file(_settings(config), source, data=data, target=out_file, jobs=jobs)):
        raise typer.Exit(1)


@cli.command(rich_help_panel=_ENVIRONMENTS)
def prepare(
    environment: Annotated[str, typer.Argument(help="Environment family.")],
    data: Annotated[
        Path | None, typer.Argument(help="JSONL or Parquet of task rows; by default the family's examples.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Tasks at a time.")] = 4,
    config: ConfigOption = None,
) -> None:
    """Build, pull and check beforehand what the tasks of a data file need. Again, it goes on where it was."""
    from prorl_envs.cli.prepare import prepare_file
    from prorl_envs.cli.running import run

    if not run(prepare_file(_settings(config), environment, data, jobs)):
        raise typer.Exit(1)


@cli.command(rich_help_panel=_ENVIRONMENTS)
def new(
    name: Annotated[str, typer.Argument(help="Of the environment and its Python package.")],
    flavour: Annotated[str, typer.Option(help="What it begins with: bash, editor or ipython.")] = "bash",
    parent: Annotated[Path, typer.Option("--in", help="Where its folder is made.")] = Path(),
) -> None:
    """Write a package with an environment of your own, which works as it is."""
    from prorl_envs.cli.new import new

    new(name, flavour, parent)


@cli.command(rich_help_panel=_ENVIRONMENTS)
def scripted(
    environment: Annotated[str, typer.Argument(help="Environment family.")],
    data: Annotated[
        Path | None, typer.Option(help="JSONL of task rows; by default the family's examples.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="TCP port; 0 takes a free one.")] = 0,
    mix: Annotated[str, typer.Option(help="Behaviours, such as solve=2,wrong=1.")] = "solve=1",
    seed: Annotated[int, typer.Option(help="Seed of the script.")] = 0,
    config: ConfigOption = None,
) -> None:
    """Serve a scripted model that plays reference solutions, to try a service without a model."""
    import asyncio

    from prorl_envs.cli.scripted import ScriptedOptions, serve_script
    from prorl_envs.testing.scripted import Mix

    options = ScriptedOptions(port=port, mix=Mix.parse(mix), seed=seed)
    asyncio.run(serve_script(_settings(config), environment, data, options))


@cli.command(rich_help_panel=_MACHINE)
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """Say what this machine can do, and what is missing."""
    from prorl_envs.cli.doctor import doctor
    from prorl_envs.cli.running import run

    if not run(doctor(_settings(None), as_json=as_json)):
        raise typer.Exit(1)


@cli.command(rich_help_panel=_MACHINE)
def conformance(
    driver: Annotated[str, typer.Option(help="Sandbox driver, such as bubblewrap.")] = "namespaces",
    image: Annotated[
        Path | None, typer.Option(exists=True, help="Image of the sandboxes; by default the host's system.")
    ] = None,
    only: Annotated[
        str, typer.Option(help="Ids of promises, or their beginnings, with commas: PROC,FS-017.")
    ] = "",
    report: Annotated[Path | None, typer.Option("--json", help="File for the outcomes as JSON.")] = None,
) -> None:
    """Try every promise that a sandbox makes, and say which are kept on this machine."""
    from prorl_envs.cli.conformance import conformance, subject
    from prorl_envs.cli.running import run
    from prorl_envs.conformance.suite import chosen

    promises = chosen(filter(None, only.split(",")))
    against = subject(driver, image.resolve() if image is not None else None)
    if not run(conformance(against, promises, report)):
        raise typer.Exit(1)


cli.command(rich_help_panel=_STORED)(view)
cli.add_typer(image, name="image", rich_help_panel=_ENVIRONMENTS)
cli.add_typer(harness, name="harness", rich_help_panel=_ENVIRONMENTS)
cli.command("check-llm", rich_help_panel=_MACHINE)(check_llm)
add_commands(cli)
cli.add_typer(nemo, name="nemo", rich_help_panel=_NEMO)
cli.command("gym-root", rich_help_panel=_NEMO)(gym_root)  # `nemo gym-root` in short


def _api_key() -> str | None:
    return os.environ.get("OPENAI_API_KEY") or None


def app() -> None:
    """The console script."""
    try:
        cli()
    except ProrlError as error:
        report(error)
        sys.exit(2)
