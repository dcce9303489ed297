"""The `prorl-envs` command line: all commands, and the conversion of errors to an exit status.

Exit status: 0 success; 1 the command ran, and its outcome is a failure; 2 invalid input, or a required part
is missing; 130 interrupted.

Help and completion stay fast: each command imports its implementation only when it runs.
"""

import errno
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prorl_envs import __version__
from prorl_envs.cli.commands.check_llm import check_llm
from prorl_envs.cli.commands.compare import compare
from prorl_envs.cli.commands.envs import envs, tasks
from prorl_envs.cli.commands.export import export
from prorl_envs.cli.commands.harness import harness
from prorl_envs.cli.commands.image import image
from prorl_envs.cli.commands.nemo import nemo
from prorl_envs.cli.commands.operate import add_commands
from prorl_envs.cli.commands.run import run
from prorl_envs.cli.commands.settings import list_settings
from prorl_envs.cli.commands.view import view
from prorl_envs.cli.options import (
    AllowMissingOption,
    ConfigOption,
    DataOption,
    EnvironmentArgument,
    EpisodesOption,
    JsonOption,
    LlmOption,
    ModelOption,
    OptionalEnvironmentArgument,
    OutOption,
    RowsArgument,
    TokenizerOption,
    api_key,
    settings_of,
    succeed,
)
from prorl_envs.cli.output.console import discard, out, replace_unencodable, report
from prorl_envs.cli.sources import SourceArgument
from prorl_envs.errors import InputError, ProrlError

if TYPE_CHECKING:
    from prorl_envs.app.compose import EarlierModel, Model

#: Panels of the help.
_ROLLOUTS, _STORED, _ENVIRONMENTS = "Rollouts", "Stored episodes", "Tasks and environments"
_MACHINE, _NEMO = "This machine", "NeMo Gym"

_FREE_SPACE = "free space, bytes or inodes (`df -h`, `df -i`), or choose a folder on another disk"

cli = typer.Typer(
    name="prorl-envs",
    help="Agentic RL environments on rootless sandboxes, served as rollouts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(requested: bool) -> None:
    if requested:
        out.print(f"prorl-envs {__version__}")
        raise typer.Exit


@cli.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
    driver: Annotated[
        str | None,
        typer.Option(help="Sandbox driver: auto, bubblewrap, apptainer, apptainer-instance, local."),
    ] = None,
) -> None:
    if driver is not None:
        os.environ["PRORL_DRIVER"] = driver  # every command reads it with the other settings


@cli.command(rich_help_panel=_ROLLOUTS)
def demo(
    llm: LlmOption = None,
    tokenizer: TokenizerOption = None,
    model: ModelOption = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Episodes per task.")] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="Maximum tasks per family.")] = None,
    swebench: Annotated[int, typer.Option(min=0, help="SWE-bench instances, which are built first.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the script.")] = 0,
    mix: Annotated[str | None, typer.Option(help="Scripted behaviours, such as solve=2,wrong=1.")] = None,
    out_dir: OutOption = None,
    config: ConfigOption = None,
) -> None:
    """Run real rollouts end to end on this machine; by default, a scripted model plays known solutions."""
    from prorl_envs.app.compose import connect
    from prorl_envs.cli.commands.demo import FAMILIES, DemoOptions, demo
    from prorl_envs.cli.run_folders import check_folder
    from prorl_envs.testing.scripted import Mix

    limits = {name: tasks for name in FAMILIES if tasks is not None} | {"swebench": swebench}
    options = DemoOptions(samples=samples, tasks=limits, seed=seed)
    if mix is not None:
        options = replace(options, mix=Mix.parse(mix))

    async def main() -> bool:
        settings = settings_of(config)
        check_folder(out_dir)
        connected = None
        if llm:
            connected = await connect(llm, settings.model, tokenizer=tokenizer, name=model, api_key=api_key())
        return await demo(settings, options, out_dir, connected)

    succeed(main())


@cli.command(rich_help_panel=_ROLLOUTS)
def serve(
    llm: LlmOption = None,
    tokenizer: TokenizerOption = None,
    model: ModelOption = None,
    host: Annotated[str | None, typer.Option(help="Address to bind; all but loopback need a token.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65_535, help="TCP port; 0 takes a free one.")] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="Store of jobs and results: a file, or memory, which is lost at a restart.  "
            "[default: runs/service.db]"
        ),
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Give every user of this machine access on loopback.")
    ] = False,
    config: ConfigOption = None,
) -> None:
    """Serve rollouts over HTTP until a signal to stop: SIGINT (Ctrl-C), SIGTERM or SIGHUP."""
    import asyncio

    from prorl_envs.app.compose import connect
    from prorl_envs.cli.commands.serve import serve
    from prorl_envs.cli.output.console import err

    settings = settings_of(config)
    address: dict[str, object] = {
        key: value for key, value in (("host", host), ("port", port)) if value is not None
    }
    if no_token:
        address["generate_token"] = False
    settings = settings.model_copy(update={"server": settings.server.model_copy(update=address)})
    if store is not None:
        service = settings.service.model_validate({**settings.service.model_dump(), "store": store})
        settings = settings.model_copy(update={"service": service})
    servers = llm or list(settings.model.servers)
    folder = tokenizer or (str(settings.model.tokenizer) if settings.model.tokenizer else None)
    if not servers and folder is None:
        raise InputError(
            "no model server is named",
            hint="--llm http://host:8000/v1; or --tokenizer alone, if servers are added later",
        )

    async def connected(earlier: "EarlierModel | None") -> "Model":
        return await connect(
            servers,
            settings.model,
            tokenizer=folder,
            name=model or settings.model.name or None,
            api_key=api_key(),
            earlier=earlier,
            note=err.print,
        )

    asyncio.run(serve(settings, connected))


@cli.command(rich_help_panel=_ROLLOUTS)
def play(
    environment: EnvironmentArgument,
    task: Annotated[str | None, typer.Argument(help="Task id; by default the first.")] = None,
    data: DataOption = None,
    config: ConfigOption = None,
) -> None:
    """Solve a task yourself, in place of the model."""
    from prorl_envs.cli.commands.play import play
    from prorl_envs.cli.run_loop import run

    run(play(settings_of(config), environment, task, data))


@cli.command(rich_help_panel=_STORED)
def show(
    source: SourceArgument,
    job: Annotated[str | None, typer.Argument(help="A job id, or the end of one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a trajectory as a conversation, or list the stored trajectories."""
    from prorl_envs.cli.commands.show import show

    show(source, job, as_json=as_json)


@cli.command(rich_help_panel=_ENVIRONMENTS)
def validate(
    environment: EnvironmentArgument,
    data: RowsArgument = None,
    jobs: EpisodesOption = 4,
    config: ConfigOption = None,
    allow_missing: AllowMissingOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check a data file without a model: references score 1, untouched workspaces 0, both twice."""
    from prorl_envs.cli.commands.audit import audit_file

    settings = settings_of(config)
    work = audit_file(
        settings, environment, data, jobs, quick=True, allow_missing=allow_missing, as_json=as_json
    )
    succeed(work)


@cli.command(rich_help_panel=_ENVIRONMENTS)
def audit(
    environment: OptionalEnvironmentArgument = None,
    data: RowsArgument = None,
    run_folder: Annotated[
        str | None,
        typer.Option(
            "--run", metavar="RUN|FILE|STORE", help="Look for suspicious steps of rewarded episodes instead."
        ),
    ] = None,
    task: Annotated[list[str] | None, typer.Option(help="Audit only this task. Repeatable.")] = None,
    probe: Annotated[
        list[str] | None, typer.Option(help="Play only this probe beside the reference. Repeatable.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Task rows of another set, such as a held-out one, to compare with.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="JSONL file of results; a further audit continues from it.")
    ] = None,
    jobs: EpisodesOption = 4,
    config: ConfigOption = None,
    allow_missing: AllowMissingOption = False,
    as_json: JsonOption = False,
) -> None:
    """Look for tasks that reward wrong solutions, leak the right ones, or are graded by chance."""
    from prorl_envs.cli.commands.audit import audit_file, audit_run

    settings = settings_of(config)
    if run_folder is not None:
        succeed(audit_run(settings, run_folder, data, as_json=as_json))
        return
    if environment is None:
        raise InputError("name an environment", hint="prorl-envs audit bash tasks.jsonl; or --run RUN")
    work = audit_file(
        settings,
        environment,
        data,
        jobs,
        task_ids=task or (),
        probes=probe or (),
        against=against,
        record=record,
        allow_missing=allow_missing,
        as_json=as_json,
    )
    succeed(work)


@cli.command(rich_help_panel=_STORED)
def replay(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="The folder of a run, a results.jsonl, or the store of a service (a file or a URL).",
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(help="Task rows; by default the rows of the stored requests, or else the examples."),
    ] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="File for the results with their new rewards.")
    ] = None,
    jobs: EpisodesOption = 4,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score stored rollouts again with the current graders, without a model, and report the changes."""
    from prorl_envs.cli.commands.replay import replay_file

    settings = settings_of(config)
    succeed(replay_file(settings, source, data=data, target=out_file, jobs=jobs, as_json=as_json))


@cli.command(rich_help_panel=_ENVIRONMENTS)
def prepare(
    environment: EnvironmentArgument,
    data: RowsArgument = None,
    jobs: Annotated[int, typer.Option(min=1, help="Tasks at a time.")] = 4,
    config: ConfigOption = None,
    allow_missing: AllowMissingOption = False,
    as_json: JsonOption = False,
) -> None:
    """Build, pull and check everything that the tasks of a data file need. Run it again to resume."""
    from prorl_envs.cli.commands.prepare import prepare_file

    settings = settings_of(config)
    succeed(prepare_file(settings, environment, data, jobs, allow_missing=allow_missing, as_json=as_json))


@cli.command(rich_help_panel=_ENVIRONMENTS)
def new(
    name: Annotated[str, typer.Argument(help="Name of the environment and of its Python package.")],
    flavour: Annotated[
        str, typer.Option(help="Tools of the generated environment: bash, editor or ipython.")
    ] = "bash",
    parent: Annotated[Path, typer.Option("--in", help="Folder in which the package is created.")] = Path(),
) -> None:
    """Create a package with a new environment that works as generated."""
    from prorl_envs.cli.commands.new import new

    new(name, flavour, parent)


@cli.command(rich_help_panel=_ENVIRONMENTS)
def scripted_model(
    environment: EnvironmentArgument,
    data: DataOption = None,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="TCP port; 0 takes a free one.")] = 0,
    mix: Annotated[str, typer.Option(help="Behaviours, such as solve=2,wrong=1.")] = "solve=1",
    seed: Annotated[int, typer.Option(help="Seed of the script.")] = 0,
    config: ConfigOption = None,
) -> None:
    """Serve a scripted model that plays reference solutions, to try a service without a model."""
    import asyncio

    from prorl_envs.cli.commands.scripted_model import serve_script
    from prorl_envs.testing.scripted import Mix

    dealt = Mix.parse(mix)
    asyncio.run(serve_script(settings_of(config), environment, data, port=port, mix=dealt, seed=seed))


@cli.command(rich_help_panel=_MACHINE)
def doctor(
    as_json: JsonOption = False,
) -> None:
    """Report which features this machine supports and which parts are missing."""
    from prorl_envs.cli.commands.doctor import doctor

    succeed(doctor(settings_of(None), as_json=as_json))


@cli.command(rich_help_panel=_MACHINE)
def conformance(
    driver: Annotated[str, typer.Option(help="Sandbox driver, such as apptainer.")] = "bubblewrap",
    image: Annotated[
        Path | None, typer.Option(exists=True, help="Image of the sandboxes; by default the host's system.")
    ] = None,
    emulate_root: Annotated[
        bool, typer.Option("--emulate-root", help="Test the sandboxes of an emulated root; needs an image.")
    ] = False,
    only: Annotated[
        str, typer.Option(help="Ids of promises, or prefixes of ids, separated by commas: PROC,FS-017.")
    ] = "",
    list_: Annotated[bool, typer.Option("--list", help="List the promises and test none.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Test every promise of a sandbox, and report which promises this machine keeps."""
    from prorl_envs.cli.commands.conformance import conformance, print_promises, subject
    from prorl_envs.conformance.suite import chosen

    promises = chosen(filter(None, only.split(",")))
    if list_:
        return print_promises(promises, as_json=as_json)
    against = subject(driver, image.resolve() if image is not None else None, emulate_root=emulate_root)
    succeed(conformance(against, promises, as_json=as_json))


cli.command(rich_help_panel=_ROLLOUTS)(run)
cli.command(rich_help_panel=_ENVIRONMENTS)(envs)
cli.command(rich_help_panel=_ENVIRONMENTS)(tasks)
cli.command(rich_help_panel=_STORED)(view)
cli.command(rich_help_panel=_STORED)(compare)
cli.command(rich_help_panel=_STORED)(export)
cli.add_typer(image, name="image", rich_help_panel=_ENVIRONMENTS)
cli.add_typer(harness, name="harness", rich_help_panel=_ENVIRONMENTS)
cli.command("settings", rich_help_panel=_MACHINE)(list_settings)
cli.command("check-llm", rich_help_panel=_MACHINE)(check_llm)
add_commands(cli)
cli.add_typer(nemo, name="nemo", rich_help_panel=_NEMO)


def app() -> None:
    """Run the command line (the console script)."""
    replace_unencodable()
    try:
        try:
            cli()
        finally:
            _flush_output()
    except ProrlError as error:
        report(error)
        sys.exit(2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        report(InputError(f"cannot write {error.filename or 'a file'}: {error.strerror}", hint=_FREE_SPACE))
        sys.exit(2)
    finally:
        _flush_output()


def _flush_output() -> None:
    """Flush the standard streams, so that the interpreter does not exit with 120 if their reader is gone: a
    closed pipe, or a closed terminal.

    Raises:
        OSError: the output cannot be written for another reason. It is lost.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is None or stream.closed:
            continue
        try:
            stream.flush()
        except OSError as error:
            discard(stream)
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
