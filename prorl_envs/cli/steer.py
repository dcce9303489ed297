"""Commands that look at a running service and change it: all of them take `--service` and `--json`."""

import os
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich import filesize
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from prorl_envs.cli.console import err, out, plain
from prorl_envs.errors import InputError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from prorl_envs.rollout.client import RolloutClient
    from prorl_envs.rollout.views import GroupView, ModelServerView, NodeView, StatusView
    from prorl_envs.rollout.watch_views import JobLine

#: Tries of one request: somebody waits for the answer.
_ATTEMPTS = 2

ServiceOption = Annotated[
    str | None,
    typer.Option("--service", help="URL of the service; by default that of the settings on this machine."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
JobIds = Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids of jobs.")]

servers = typer.Typer(help="The model servers of a running service.", invoke_without_command=True)
nodes = typer.Typer(help="The further machines of a running service.", invoke_without_command=True)


def add_commands(cli: typer.Typer) -> None:
    """Add all of them."""
    for command in (top, status, jobs, cancel, retry, pause, resume, drain, limits):
        cli.command(rich_help_panel="A running service")(command)
    cli.add_typer(servers, name="servers", rich_help_panel="A running service")
    cli.add_typer(nodes, name="nodes", rich_help_panel="A running service")


def _on[T](service: str | None, work: "Callable[[RolloutClient], Awaitable[T]]") -> T:
    """Do something with a service: the one named, or the one that the settings describe."""
    from prorl_envs.cli.running import run
    from prorl_envs.config import load_settings
    from prorl_envs.rollout.client import RolloutClient
    from prorl_envs.rollout.errors import Unauthorized

    settings = load_settings(None, os.environ).server
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    url = service or f"http://{host}:{settings.port}"
    if not url.startswith(("http://", "https://")):
        raise InputError(f"{url} is no URL of a service", hint="--service http://HOST:PORT")
    token = settings.token.get_secret_value() if settings.token else None

    async def main() -> T:
        async with RolloutClient(url, token=token, attempts=_ATTEMPTS) as client:
            return await work(client)

    try:
        return run(main())
    except Unauthorized as error:
        what = "the token is not the service's" if token else "the service asks for a token"
        raise Unauthorized(what, hint="set PRORL_SERVER__TOKEN to its server.token") from error


def _say(found: "BaseModel | Sequence[BaseModel]", as_json: bool, show: Callable[[], None]) -> None:
    from pydantic import BaseModel

    if not as_json:
        show()
    elif isinstance(found, BaseModel):
        out.print(found.model_dump_json(indent=2), soft_wrap=True)
    else:
        lines = ",\n".join(one.model_dump_json() for one in found)
        out.print(f"[{lines}]", soft_wrap=True)


def _table(*names: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        numeric = name in numbers
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    return table


def top(
    service: ServiceOption = None,
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch a service in the terminal, until Ctrl-C; where nobody watches one, once."""
    from prorl_envs.cli.top import picture, watch

    if as_json or once or not out.is_terminal:
        view = _on(service, lambda client: client.dashboard())
        _say(view, as_json, lambda: out.print(picture(view, height=None)))
    else:
        _on(service, watch)


def status(service: ServiceOption = None, as_json: JsonOption = False) -> None:
    """Say how a service is: its state, pools and counts."""
    found = _on(service, lambda client: client.status())
    _say(found, as_json, lambda: _show_status(found))


def _show_status(found: "StatusView") -> None:
    state = f"paused: {found.paused}" if found.paused else found.state
    out.print(f"{state}, {found.unfinished} unfinished of {found.queue_limit}, up {found.uptime_s:.0f} s")
    table = _table("stage", "active", "limit", "waiting", numbers=("active", "limit", "waiting"))
    for stage, pool in found.pools.items():
        table.add_row(stage.upper(), str(pool.active), str(pool.limit), str(pool.waiting))
    table.add_row("live", str(found.live), str(found.live_limit), "")
    out.print(table)
    counts = [f"{n} {name}" for name, n in found.finished.items()]
    out.print(f"results: {', '.join(counts)}; {found.retries} retries")
    if failed := [f"{n} {kind}" for kind, n in found.failures.items() if n]:
        out.print(f"failures: {', '.join(failed)}")


def jobs(
    state: Annotated[
        list[str] | None, typer.Option(help="Only queued, init, run or eval. May be repeated.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most of them.")] = 50,
    service: ServiceOption = None,
    as_json: JsonOption = False,
) -> None:
    """List unfinished jobs, those whose stage runs first."""
    if unknown := set(state or ()) - {"queued", "init", "run", "eval"}:
        raise InputError(f"no state {min(unknown)!r}", hint="queued, init, run or eval")
    page = _on(service, lambda client: client.jobs(states=state or (), limit=limit))

    def show() -> None:
        out.print(jobs_table(page.jobs))
        if page.total > len(page.jobs):
            err.print(f"{len(page.jobs)} of {page.total}; --limit shows more")

    _say(page, as_json, show)


def jobs_table(lines: "Sequence[JobLine]") -> Table:
    """One row per unfinished job."""
    numbers = ("for s", "turns", "tokens", "memory", "attempt")
    table = _table("job", "environment", "state", *numbers, "node", numbers=numbers)
    for line in lines:
        where = line.state.value if line.active or line.state == "queued" else f"for {line.state.value}"
        table.add_row(
            plain(line.id),
            plain(line.environment),
            Text(where, style="green" if line.active else "dim"),
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
    what: Annotated[
        Literal["auto", "job", "group", "batch"],
        typer.Option("--as", help="What the ids are of; `auto` tries a job, a group, a batch in this order."),
    ] = "auto",
    service: ServiceOption = None,
    as_json: JsonOption = False,
) -> None:
    """End jobs, groups or batches; what has finished keeps its result."""

    async def work(client: "RolloutClient") -> "list[BaseModel]":
        return [await _cancelled(client, name, what) for name in ids]

    found = _on(service, work)
    _say(found, as_json, lambda: err.print(f"cancelled: {', '.join(ids)}"))


async def _cancelled(client: "RolloutClient", name: str, what: str) -> "BaseModel":
    from prorl_envs.rollout.errors import NotFound

    ways: dict[str, Callable[[str], Awaitable[BaseModel]]] = {
        "job": client.cancel_job,
        "group": client.cancel_group,
        "batch": client.cancel_batch,
    }
    if what != "auto":
        return await ways[what](name)
    for way in ways.values():
        try:
            return await way(name)
        except NotFound:
            continue
    raise InputError(f"no job, group or batch {name!r}", hint="prorl-envs jobs lists what is unfinished")


def retry(ids: JobIds, service: ServiceOption = None, as_json: JsonOption = False) -> None:
    """Do finished jobs again, each as a group of its own; the results that there are stay."""

    async def work(client: "RolloutClient") -> "list[GroupView]":
        return [await client.retry_job(name) for name in ids]

    found = _on(service, work)
    _say(found, as_json, lambda: out.print("\n".join(group.id for group in found), soft_wrap=True))


def pause(
    mode: Annotated[
        Literal["finish", "hold"],
        typer.Option(help="`finish` begins no job; `hold` starts no stage, and what runs waits at its end."),
    ] = "finish",
    service: ServiceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a service accept jobs and start less, until it is resumed."""
    from prorl_envs.rollout.scheduler import Pause

    found = _on(service, lambda client: client.pause(Pause(mode)))
    _say(found, as_json, lambda: err.print(f"paused: {found.paused}; `resume` ends it"))


def resume(service: ServiceOption = None, as_json: JsonOption = False) -> None:
    """End a pause or a drain."""
    found = _on(service, lambda client: client.resume())
    _say(found, as_json, lambda: err.print(f"{found.state}, {found.unfinished} unfinished"))


def drain(
    wait_s: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for what is there.")] = 0.0,
    service: ServiceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a service accept nothing more and finish what is there; with --wait, status 1 if some is left."""

    async def work(client: "RolloutClient") -> "StatusView":
        left = wait_s
        found = await client.drain(wait_s=min(left, 60.0))
        while found.unfinished and (left := left - 60.0) > 0:
            found = await client.drain(wait_s=min(left, 60.0))
        return found

    found = _on(service, work)
    _say(found, as_json, lambda: err.print(f"{found.state}, {found.unfinished} unfinished"))
    if wait_s and found.unfinished:
        raise typer.Exit(1)


def limits(
    init: Annotated[int | None, typer.Option(min=1, help="Jobs in INIT at once.")] = None,
    run: Annotated[int | None, typer.Option(min=1, help="Jobs in RUN at once.")] = None,
    evaluate: Annotated[int | None, typer.Option("--eval", min=1, help="Jobs in EVAL at once.")] = None,
    live: Annotated[int | None, typer.Option(min=1, help="Jobs that hold a sandbox.")] = None,
    queue: Annotated[int | None, typer.Option(min=1, help="Jobs accepted and not finished.")] = None,
    attempts: Annotated[int | None, typer.Option(min=1, max=10, help="Attempts at a job.")] = None,
    service: ServiceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Set what may happen at once on a service's own machine, until it ends; without options, show it."""
    from prorl_envs.rollout.watch_views import LimitsRequest

    asked = LimitsRequest(init=init, run=run, eval=evaluate, live=live, queue=queue, attempts=attempts)
    named = bool(asked.model_dump(exclude_none=True))
    found = _on(service, lambda client: client.set_limits(asked) if named else client.status())
    _say(found, as_json, lambda: _show_status(found))


@servers.callback(invoke_without_command=True)
def list_servers(context: typer.Context, service: ServiceOption = None, as_json: JsonOption = False) -> None:
    """List the model servers of a running service."""
    if context.invoked_subcommand is None:
        found = _on(service, lambda client: client.model_servers())
        _say(found, as_json, lambda: out.print(servers_table(found)))


@servers.command("add")
def add_server(
    url: Annotated[str, typer.Argument(help="Base URL, such as http://host:8000/v1.")],
    protocol: Annotated[
        Literal["auto", "vllm", "sglang", "llamacpp", "openai"], typer.Option(help="What it speaks.")
    ] = "auto",
    service: ServiceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Offer a further model server to new rollouts."""
    found = _on(service, lambda client: client.add_model_server(url, protocol=protocol))
    _say(found, as_json, lambda: out.print(servers_table(found)))


@servers.command("drain")
def drain_server(
    url: Annotated[str, typer.Argument(help="As the list names it.")],
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, max=60, help="Seconds to wait for its turns in flight.")
    ] = 0.0,
    service: ServiceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give a model server no more turns; it is gone once those in flight have ended."""
    found = _on(service, lambda client: client.remove_model_server(url, wait_s=wait_s))
    _say(found, as_json, lambda: out.print(servers_table(found)))


def servers_table(found: "Sequence[ModelServerView]") -> Table:
    """One row per model server."""
    numbers = ("in flight", "sessions", "turns")
    table = _table("server", "state", "protocol", *numbers, "weights", numbers=numbers)
    for server in found:
        state = "draining" if server.draining else "healthy" if server.healthy else "failing"
        style = {"healthy": "green", "failing": "red"}.get(state, "yellow")
        counts = (str(n) for n in (server.in_flight, server.sessions, server.turns))
        table.add_row(
            plain(server.url),
            Text(state, style=style),
            server.protocol,
            *counts,
            plain(server.weight_version),
        )
    return table


@nodes.callback(invoke_without_command=True)
def list_nodes(context: typer.Context, service: ServiceOption = None, as_json: JsonOption = False) -> None:
    """List the further machines of a running service."""
    if context.invoked_subcommand is None:
        found = _on(service, lambda client: client.nodes())
        _say(found, as_json, lambda: out.print(nodes_table(found)))


NodeName = Annotated[str, typer.Argument(metavar="NODE", help="As the list names it.")]


@nodes.command("drain")
def drain_node(name: NodeName, service: ServiceOption = None, as_json: JsonOption = False) -> None:
    """Give a node no further jobs; it finishes what it has."""
    found = _on(service, lambda client: client.drain_node(name))
    _say(found, as_json, lambda: out.print(nodes_table(found)))


@nodes.command("resume")
def resume_node(name: NodeName, service: ServiceOption = None, as_json: JsonOption = False) -> None:
    """Give a node jobs again."""
    found = _on(service, lambda client: client.resume_node(name))
    _say(found, as_json, lambda: out.print(nodes_table(found)))


def nodes_table(found: "Sequence[NodeView]") -> Table:
    """One row per node."""
    numbers = ("live", "limit", "sandboxes", "attempts")
    table = _table("node", "state", *numbers, "reason", numbers=numbers)
    for node in found:
        style = {"ready": "green", "lost": "red"}.get(node.state, "yellow")
        counts = (str(n) for n in (node.live, node.live_limit, node.sandboxes, node.attempts))
        table.add_row(plain(node.name), Text(node.state, style=style), *counts, plain(node.reason))
    return table
