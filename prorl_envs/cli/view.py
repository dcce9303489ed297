"""`prorl-envs view`: stored episodes in a browser, or in one HTML file that others can open."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prorl_envs.cli.console import err, out
from prorl_envs.cli.sources import SourceArgument, open_episodes
from prorl_envs.errors import InputError

if TYPE_CHECKING:
    from prorl_envs.viewer.episodes import Episodes
    from prorl_envs.viewer.rows import Texts
    from prorl_envs.viewer.summary import Summary

#: The tokenizer of the scripted model, which the demo uses.
SCRIPTED = "scripted"


def view(
    source: SourceArgument,
    html: Annotated[
        Path | None, typer.Option(help="Write one HTML file, which opens without a server, and end.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--job", help="For --html: a job, a group, or the end of a job id. May be repeated."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hub name of the model's tokenizer, to read tokens; `scripted` is the demo's."
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="TCP port; 0 takes a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--open", help="Open the link in a browser here.")] = False,
) -> None:
    """Look at stored episodes in a browser: conversations, tokens, time, rewards, samples side by side."""
    from prorl_envs.cli.running import run

    if only and html is None:
        raise InputError("--job chooses what goes into --html", hint="without it the page has a filter")
    episodes = open_episodes(source)
    try:
        texts = _texts(tokenizer) if tokenizer else None
        if html is not None:
            _export(episodes, html, only or [], texts)
        else:
            run(_serve(episodes, texts, port, browser))
    finally:
        episodes.close()


def _texts(name: str) -> "Texts":
    from prorl_envs.policy.token_texts import token_texts

    decode: Callable[[Sequence[int]], str]
    if name == SCRIPTED:
        from prorl_envs.testing.tokenizer import builtin_renderer

        decode = builtin_renderer().decode
    else:
        from prorl_envs.policy.loading import load_renderer

        decode = load_renderer(name).decode
    return partial(token_texts, decode)


async def _serve(episodes: "Episodes", texts: "Texts | None", port: int, browser: bool) -> None:
    import asyncio
    import secrets
    import webbrowser

    from prorl_envs.rollout.server import answering
    from prorl_envs.viewer.offline import offline_app, reading_ahead

    token = secrets.token_urlsafe(24)
    async with (
        reading_ahead(episodes, offline_app(episodes, token, texts)) as app,
        answering(app, port=port, last_requests_s=1, log_level="critical") as url,
    ):
        link = f"{url}/{token}/"
        out.print(link, soft_wrap=True)
        err.print(f"{episodes.name} is at that link, for whoever has it; Ctrl-C ends it")
        err.print(f"from another machine: ssh -L {url.rpartition(':')[2]}:{url.removeprefix('http://')} HOST")
        if browser:
            webbrowser.open(link)
        await asyncio.Event().wait()


def _export(episodes: "Episodes", target: Path, wanted: Sequence[str], texts: "Texts | None") -> None:
    from prorl_envs.viewer.export import export_html

    episodes.extend()
    name = episodes.name
    if episodes.bad:
        line, problem = episodes.bad[0]
        raise InputError(f"{name}:{line}: {problem}", hint="mend or drop the line")
    chosen = [number for number, one in enumerate(episodes.summaries) if not wanted or _fits(one, wanted)]
    if not chosen:
        raise InputError(f"nothing in {name} fits", hint=f"prorl-envs show {name} lists its jobs")
    content = export_html((episodes.line(number) for number in chosen), name, texts)
    try:
        target.write_bytes(content)
    except OSError as error:
        raise InputError(
            f"cannot write {target}: {error.strerror}", hint="choose another place: --html"
        ) from error
    noun = "episode" if len(chosen) == 1 else "episodes"
    err.print(f"{target}: {len(chosen)} {noun}, {len(content) / 1e6:.1f} MB; it opens in any browser")


def _fits(one: "Summary", wanted: Sequence[str]) -> bool:
    return any(name in (one.job_id, one.group_id) or one.job_id.endswith(name) for name in wanted)
