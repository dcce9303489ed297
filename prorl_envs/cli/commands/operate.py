"""Commands that inspect and control a running service, selected by `--service`."""

import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich import filesize
from rich.table import Table
from rich.text import Text

from prorl_envs.cli.options import JsonOption
from prorl_envs.cli.output.console import err, out, plain, print_json
from prorl_envs.cli.output.fitted_table import plain_table
from prorl_envs.errors import InputError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from prorl_envs.rollout.api.dashboard import JobLine
    from prorl_envs.rollout.api.views import GroupView, ModelServerView, NodeView, StatusView
    from prorl_envs.rollout.client.client import RolloutClient

#: Maximum attempts of a request: few, because a user waits for the answer.
_ATTEMPTS = 2

ServiceOption = Annotated[
    str | None,
    typer.Option("--service", help="URL of the service; by default the service of the settings, here."),
]
JobIds = Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids of jobs.")]

servers = typer.Typer(
    help="List, add and remove the model servers of a running service.", no_args_is_help=True
)
nodes = typer.Typer(help="List, drain and resume the nodes of a service.", no_args_is_help=True)


def add_commands(cli: typer.Typer) -> None:
    """Add all commands of this module."""
    for command in (
        status,
        dashboard,
        token,
        jobs,
        cancel,
        retry,
        acknowledge,
        pause,
        resume,
        drain,
        limits,
    ):
        cli.command(rich_help_panel="A running service")(command)
    cli.add_typer(servers, name="servers", rich_help_panel="A running service")
    cli.add_typer(nodes, name="nodes", rich_help_panel="A running service")


def _named(service: str | None) -> tuple[str, str | None]:
    """Return the URL and the configured token of a service; the default URL is that of the settings."""
    from prorl_envs.config import load_settings

    settings = load_settings(None, os.environ).server
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    url = service or f"http://{host}:{settings.port}"
    if not url.startswith(("http://", "https://")):
        raise InputError(f"{url} is not the URL of a service", hint="use --service http://HOST:PORT")
    return url, settings.token.get_secret_value() if settings.token else None


def _on[T](service: str | None, work: "Callable[[RolloutClient], Awaitable[T]]") -> T:
    """Run `work` with a client of a service, which is selected as in `_named`."""
    from prorl_envs.cli.run_loop import run
    from prorl_envs.rollout.api.errors import Unauthorized
    from prorl_envs.rollout.client.client import RolloutClient

    url, token = _named(service)

    async def main() -> T:
        async with RolloutClient(url, token=token, attempts=_ATTEMPTS) as client:
            return await work(client)

    try:
        return run(main())
    except Unauthorized as error:
        problem = "the service does not accept the token" if token else "the service requires a token"
        hint = "set PRORL_SERVER__TOKEN to its server.token, or run this as the user who started the service"
        raise Unauthorized(problem, hint=hint) from error


def dashboard(
    service: ServiceOption = None,
    browser: Annotated[bool, typer.Option("--open", help="Open the link in a browser here.")] = False,
) -> None:
    """Print a link to a service's dashboard that signs in one browser, once."""
    link = _on(service, lambda client: client.login_link())
    out.print(link, soft_wrap=True)
    if browser:
        import webbrowser

        webbrowser.open(link)


def token(service: ServiceOption = None) -> None:
    """Print the bearer token of a service: the configured token, or that of your service on this machine."""
    from prorl_envs.rollout.client.token_files import addresses_of, read_token

    url, configured = _named(service)
    bearer = configured or next(filter(None, map(read_token, addresses_of(url))), None)
    if bearer is None:
        hint = "set PRORL_SERVER__TOKEN, or run this as the user who started the service on this machine"
        raise InputError(f"the token of {url} is unknown", hint=hint)
    out.print(bearer, soft_wrap=True)


def _say(found: "BaseModel | Sequence[BaseModel]", as_json: bool, show: Callable[[], None]) -> None:
    if as_json:
        print_json(found)
    else:
        show()


def status(service: ServiceOption = None, as_json: JsonOption = False) -> None:
    """Show the status of a service: its state, pools and counts."""
    found = _on(service, lambda client: client.status())
    _say(found, as_json, lambda: _show_status(found))


def _show_status(found: "StatusView") -> None:
    state = f"paused: {found.paused}" if found.paused else found.state
    out.print(f"{state}, {found.unfinished} unfinished of {found.queue_limit}, up {found.uptime_s:.0f} s")
    table = plain_table("stage", "active", "limit", "waiting", numbers=("active", "limit", "waiting"))
    for stage, pool in found.pools.items():
        table.add_row(stage.upper(), str(pool.active), str(pool.limit), str(pool.waiting))
    table.add_row("with a sandbox", str(found.jobs_with_sandbox), str(found.max_jobs_with_sandbox), "")
    out.print(table)
    counts = [f"{n} {name}" for name, n in found.finished.items()]
    out.print(f"results: {', '.join(counts)}; {found.retries} retries")
    if failed := [f"{n} {kind}" for kind, n in found.failures.items() if n]:
        out.print(f"failures: {', '.join(failed)}")


def jobs(
    state: Annotated[
        list[str] | None, typer.Option(help="Only queued, init, run or eval. May be repeated.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of jobs.")] = 50,
    service: ServiceOption = None,
    as_json: JsonOption = False,
) -> None:
    """List unfinished jobs; those whose stage is running come first."""
    if unknown := set(state or ()) - {"queued", "init", "run", "eval"}:
        raise InputError(f"no state {min(unknown)!r}", hint="use queued, init, run or eval")
    page = _on(service, lambda client: client.jobs(states=state or (), limit=limit))

    def show() -> None:
        out.print(jobs_table(page.jobs))
        if page.total > len(page.jobs):
            err.print(f"{len(page.jobs)} of {page.total}; --limit shows more")

    _say(page, as_json, show)


def jobs_table(lines: "Sequence[JobLine]") -> Table:
    """Return a table with one row per unfinished job."""
    numbers = ("for s", "turns", "tokens", "memory", "attempt")
    table = plain_table("job", "environment", "state", *numbers, "node", numbers=numbers)
    for line in lines:
        state = line.state.value if line.active or line.state == "queued" else f"for {line.state.value}"
        table.add_row(
            plain(line.id),
            plain(line.environment),
            Text(state, style="green" if line.active else "dim"),
            f"{line.since_s:.1f}",
            str(line.turns),
            str(line.tokens),
            "" if line.memory_bytes is None else filesize.decimal(line.memory_bytes),
            str(line.attempts),
            plain(line.node or "here"),
        )
    return table


def cancel(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="A job, a group or a batch.")],
    kind: Annotated[
        Literal["auto", "job", "group", "batch"],
        typer.Option("--as", help="Kind of the ids; `auto` tries a job, a group, a batch in this order."),
    ] = "auto",
    service: ServiceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel jobs, groups or batches; finished jobs keep their results."""

    async def work(client: "RolloutClient") -> "list[BaseModel]":
        return [await _cancelled(client, name, kind) for name in ids]

    found = _on(service, work)
    _say(found, as_json, lambda: err.print(f"cancelled: {', '.join(ids)}"))


async def _cancelled(client: "RolloutClient", name: str, kind: str) -> "BaseModel":
    from prorl_envs.rollout.api.errors import NotFound

    requests: dict[str, Callable[[str], Awaitable[BaseModel]]] = {
        "job": client.cancel_job,
        "group": client.cancel_group,
        "batch": client.cancel_batch,
    }
    if kind != "auto":
        return await requests[kind](name)
    for request in requests.values():
        try:
            return await request(name)
        except NotFound:
            continue
    raise InputError(f"no job, group or batch {name!r}", hint="prorl-envs jobs lists unfinished jobs")


def retry(ids: JobIds, service: ServiceOption = None, as_json: JsonOption = False) -> None:
    """Run finished jobs again, each as a new group; existing results are kept."""

    async def work(client: "RolloutClient") -> "list[GroupView]":
        return [await client.retry_job(name) for name in ids]

    found = _on(service, work)
    _say(found, as_json, lambda: out.print("\n".join(group.id for group in found), soft_wrap=True))


def acknowledge(
    groups: Annotated[list[str] | None, typer.Argument(metavar="[GROUP]...", help="Ids of groups.")] = None,
    state: Annotated[
        list[str] | None, typer.Option(help="Only done, failed or cancelled. May be repeated.")
    ] = None,
    environments: Annotated[
        list[str] | None,
        typer.Option("--environment", help="Only results of this environment. May be repeated."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All stored results.")] = False,
    service: ServiceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Mark results as read, so that a durable store may delete them; a result must match all filters."""
    from prorl_envs.rollout.api.types import JobState, Selection
    from prorl_envs.rollout.api.views import Health

    if unknown := set(state or ()) - {"done", "failed", "cancelled"}:
        raise InputError(f"no final state {min(unknown)!r}", hint="use done, failed or cancelled")
    only = Selection(
        groups=frozenset(groups or ()),
        environments=frozenset(environments or ()),
        states=frozenset(map(JobState, state or ())),
    )
    if (only == Selection()) != everything:
        raise InputError("which results?", hint="name groups, --state or --environment; or only --all")
    _on(service, lambda client: client.acknowledge(only=only))
    _say(Health(status="ok"), as_json, lambda: err.print("acknowledged: the store may delete these results"))


def pause(
    mode: Annotated[
        Literal["finish", "hold"],
        typer.Option(
            help="`finish` starts no job; `hold` starts no stage: running stages finish, and their jobs wait."
        ),
    ] = "finish",
    service: ServiceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Pause a service until it is resumed: it accepts jobs, but does not start them."""
    from prorl_envs.rollout.api.views import Pause

    found = _on(service, lambda client: client.pause(Pause(mode)))
    _say(found, as_json, lambda: err.print(f"paused: {found.paused}; `resume` ends the pause"))


def resume(service: ServiceOption = None, as_json: JsonOption = False) -> None:
    """End a pause or a drain."""
    found = _on(service, lambda client: client.resume())
    _say(found, as_json, lambda: err.print(f"{found.state}, {found.unfinished} unfinished"))


def drain(
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for accepted jobs.")] = 0.0,
    service: ServiceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop accepting jobs and finish the accepted jobs; with --wait, exit status 1 if some remain."""

    async def work(client: "RolloutClient") -> "StatusView":
        remaining_s = wait_s
        found = await client.drain(wait_s=min(remaining_s, 60.0))
        while found.unfinished and (remaining_s := remaining_s - 60.0) > 0:
            found = await client.drain(wait_s=min(remaining_s, 60.0))
        return found

    found = _on(service, work)
    _say(found, as_json, lambda: err.print(f"{found.state}, {found.unfinished} unfinished"))
    if wait_s and found.unfinished:
        raise typer.Exit(1)


def limits(
    init: Annotated[int | None, typer.Option(min=1, help="Maximum active jobs in INIT.")] = None,
    run: Annotated[int | None, typer.Option(min=1, help="Maximum active jobs in RUN.")] = None,
    evaluate: Annotated[
        int | None, typer.Option("--eval", min=1, help="Maximum active jobs in EVAL.")
    ] = None,
    max_jobs_with_sandbox: Annotated[
        int | None, typer.Option(min=1, help="Maximum jobs that hold a sandbox.")
    ] = None,
    queue: Annotated[int | None, typer.Option(min=1, help="Maximum accepted, unfinished jobs.")] = None,
    attempts: Annotated[int | None, typer.Option(min=1, max=10, help="Maximum attempts of a job.")] = None,
    service: ServiceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set the limits of a service's own machine until the service stops; without options, show them."""
    from prorl_envs.rollout.api.dashboard import LimitsRequest

    request = LimitsRequest(
        init=init,
        run=run,
        eval=evaluate,
        max_jobs_with_sandbox=max_jobs_with_sandbox,
        queue=queue,
        attempts=attempts,
    )
    has_changes = bool(request.model_dump(exclude_none=True))
    found = _on(service, lambda client: client.set_limits(request) if has_changes else client.status())
    _say(found, as_json, lambda: _show_status(found))


@servers.command("list")
def list_servers(service: ServiceOption = None, as_json: JsonOption = False) -> None:
    """List the model servers of a running service."""
    found = _on(service, lambda client: client.model_servers())
    _say(found, as_json, lambda: out.print(servers_table(found)))


@servers.command("add")
def add_server(
    url: Annotated[str, typer.Argument(help="Base URL, such as http://host:8000/v1.")],
    protocol: Annotated[
        Literal["auto", "vllm", "sglang", "llamacpp", "openai"], typer.Option(help="Protocol of the server.")
    ] = "auto",
    service: ServiceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a model server for new rollouts, and report whether it answers."""
    found = _on(service, lambda client: client.add_model_server(url, protocol=protocol))
    _say(found, as_json, lambda: out.print(servers_table(found)))
    _warn_of(found, url)


def _warn_of(found: "Sequence[ModelServerView]", url: str) -> None:
    """Warn on standard error if a server that was added does not answer."""
    from prorl_envs.model.servers.detect import split_protocol

    [added] = [server for server in found if server.url == split_protocol(url)[1]]
    if added.state not in ("healthy", "draining"):
        problem = added.problem or "no answer yet"
        err.print(plain(f"warning: {added.url} is {added.state}: {problem}"))
        err.print("hint: the server gets turns as soon as it answers; `servers drain` removes it")


@servers.command("drain")
def drain_server(
    url: Annotated[str, typer.Argument(help="URL of the server, as in the list.")],
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, max=60, help="Seconds to wait for the server's turns in flight.")
    ] = 0.0,
    service: ServiceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send no new turns to a model server, and remove it when its turns in flight have finished."""
    found = _on(service, lambda client: client.remove_model_server(url, wait_s=wait_s))
    _say(found, as_json, lambda: out.print(servers_table(found)))


def servers_table(found: "Sequence[ModelServerView]") -> Table:
    """Return a table with one row per model server."""
    numbers = ("in flight", "sessions", "turns")
    table = plain_table("server", "state", "protocol", *numbers, "weights", numbers=numbers)
    for server in found:
        style = {"healthy": "green", "failing": "red"}.get(server.state, "yellow")
        counts = (str(n) for n in (server.in_flight, server.sessions, server.turns))
        table.add_row(
            plain(server.url),
            Text(server.state, style=style),
            server.protocol,
            *counts,
            plain(server.weight_version),
        )
    return table


@nodes.command("list")
def list_nodes(service: ServiceOption = None, as_json: JsonOption = False) -> None:
    """List the nodes of a running service: the other machines that run its jobs."""
    found = _on(service, lambda client: client.nodes())
    _say(found, as_json, lambda: out.print(nodes_table(found)))


NodeName = Annotated[str, typer.Argument(metavar="NODE", help="Name of the node, as in the list.")]


@nodes.command("drain")
def drain_node(name: NodeName, service: ServiceOption = None, as_json: JsonOption = False) -> None:
    """Send no new jobs to a node; it finishes its jobs."""
    found = _on(service, lambda client: client.drain_node(name))
    _say(found, as_json, lambda: out.print(nodes_table(found)))


@nodes.command("resume")
def resume_node(name: NodeName, service: ServiceOption = None, as_json: JsonOption = False) -> None:
    """Send jobs to a drained node again."""
    found = _on(service, lambda client: client.resume_node(name))
    _say(found, as_json, lambda: out.print(nodes_table(found)))


def nodes_table(found: "Sequence[NodeView]") -> Table:
    """Return a table with one row per node."""
    numbers = ("with sandbox", "limit", "sandboxes", "attempts")
    table = plain_table("node", "state", *numbers, "reason", numbers=numbers)
    for node in found:
        style = {"ready": "green", "lost": "red"}.get(node.state, "yellow")
        counts = (
            str(n)
            for n in (node.jobs_with_sandbox, node.max_jobs_with_sandbox, node.sandboxes, node.attempts)
        )
        table.add_row(plain(node.name), Text(node.state, style=style), *counts, plain(node.reason))
    return table
