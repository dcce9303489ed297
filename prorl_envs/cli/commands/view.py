"""`prorl-envs view`: shows stored episodes in a browser, or writes them to one HTML file."""

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prorl_envs.cli.output.console import err, out
from prorl_envs.cli.sources import SourceArgument, check_lines, is_store, open_episodes
from prorl_envs.errors import InputError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from prorl_envs.rollout.api.summary import Summary
    from prorl_envs.viewer.episodes import EpisodeSource, Texts
    from prorl_envs.viewer.runs import RunView

#: Name of the scripted model's tokenizer, which the demo uses.
SCRIPTED = "scripted"
#: Maximum bytes that are read before the page is served, to refuse a file without results.
_FIRST_BYTES = 1 << 20


def view(
    source: SourceArgument,
    html: Annotated[
        Path | None, typer.Option(help="Write one HTML file, which opens without a server, and exit.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--job", help="For --html: a job, a group, or the end of a job id. May be repeated."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hub name of the model's tokenizer, to show text; `scripted` is the demo's."
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="TCP port; 0 takes a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--open", help="Open the link in a browser here.")] = False,
) -> None:
    """Browse stored episodes: conversations, tokens, times, rewards, and samples side by side."""
    from prorl_envs.cli.run_loop import run

    if only and html is None:
        raise InputError("--job needs --html", hint="without --html, use the filter on the page")
    texts = _texts(tokenizer) if tokenizer else None
    if html is not None:
        if _is_runs_folder(source):
            raise InputError(f"{source} has several runs", hint="--html takes the folder of one run")
        err.print(write_html(source, html, texts, only or []))
        return
    if _is_runs_folder(source):
        run(_serve_runs(Path(source), texts, port, browser))
        return
    with closing(open_episodes(source)) as episodes:
        episodes.extend(_FIRST_BYTES)
        if not episodes.summaries:
            check_lines(episodes, source)
        run(_serve(episodes, texts, _run_of(source), port, browser))


def write_html(source: str, target: Path, texts: "Texts | None", only: Sequence[str] = ()) -> str:
    """Write episodes to one HTML file; return a sentence about it.

    Args:
        source: run folder, file of results or store.
        target: file to write.
        texts: decodes tokens; None shows them as numbers.
        only: jobs, groups, or ends of job ids; all episodes if empty.

    Raises:
        InputError: the source cannot be read or has no such episode, or the file cannot be written.
    """
    from prorl_envs.viewer.export import export_html

    with closing(open_episodes(source)) as episodes:
        episodes.extend()
        name = episodes.name
        check_lines(episodes, name)
        numbered = enumerate(episodes.summaries)
        chosen = [number for number, summary in numbered if not only or _matches(summary, only)]
        if not chosen:
            hint = f"prorl-envs show {name} lists its jobs"
            raise InputError(f"no episode of {name} matches --job", hint=hint)
        content = export_html((episodes.line(number) for number in chosen), name, texts, _run_of(source))
    try:
        target.write_bytes(content)
    except OSError as error:
        raise InputError(
            f"cannot write {target}: {error.strerror}", hint="choose another path: --html"
        ) from error
    noun = "episode" if len(chosen) == 1 else "episodes"
    return f"{target}: {len(chosen)} {noun}, {len(content) / 1e6:.1f} MB; it opens in any browser"


def _is_runs_folder(source: str) -> bool:
    from prorl_envs.rollout.client.result_files import RESULTS
    from prorl_envs.viewer.runs import runs_of

    path = Path(source)
    return path.is_dir() and not (path / RESULTS).exists() and bool(runs_of(path))


def _run_of(source: str) -> "RunView":
    """Return the run of a source; empty for a store, and for a file that is not in the folder of a run."""
    from prorl_envs.runs.folder import RUN
    from prorl_envs.viewer.runs import RunView

    path = Path(source)
    folder = path if path.is_dir() else path.parent
    return RunView(folder.resolve() if (folder / RUN).exists() and not is_store(source) else None)


def _texts(name: str) -> "Texts":
    from prorl_envs.model.tokens.token_texts import token_texts

    decode: Callable[[Sequence[int]], str]
    if name == SCRIPTED:
        from prorl_envs.testing.tokenizer import builtin_renderer

        decode = builtin_renderer().decode
    else:
        from prorl_envs.model.tokens.loading import load_renderer

        decode = load_renderer(name).decode
    return partial(token_texts, decode)


async def _serve(
    episodes: "EpisodeSource", texts: "Texts | None", run: "RunView", port: int, browser: bool
) -> None:
    import secrets

    from prorl_envs.viewer.offline import offline_app

    token = secrets.token_urlsafe(24)
    await _answer(offline_app(episodes, token, texts, run), token, episodes.name, port, browser)


async def _serve_runs(folder: Path, texts: "Texts | None", port: int, browser: bool) -> None:
    import secrets

    from prorl_envs.viewer.offline import runs_app
    from prorl_envs.viewer.runs import RunsFolder

    token, runs = secrets.token_urlsafe(24), RunsFolder(folder)
    async with runs_app(runs, token, texts) as app:
        await _answer(app, token, runs.name, port, browser)


async def _answer(app: "ASGIApp", token: str, name: str, port: int, browser: bool) -> None:
    """Serve requests, and print the link, until interrupted."""
    import asyncio
    import webbrowser

    from prorl_envs.rollout.http.server import answering

    async with answering(app, port=port, last_requests_s=1, log_level="critical") as url:
        link = f"{url}/{token}/"
        out.print(link, soft_wrap=True)
        err.print(f"this link shows {name} to everyone who has it; Ctrl-C stops it")
        err.print(f"from another machine: ssh -L {url.rpartition(':')[2]}:{url.removeprefix('http://')} HOST")
        if browser:
            webbrowser.open(link)
        await asyncio.Event().wait()


def _matches(summary: "Summary", job_names: Sequence[str]) -> bool:
    ids = (summary.job_id, summary.group_id)
    return any(name in ids or summary.job_id.endswith(name) for name in job_names)
