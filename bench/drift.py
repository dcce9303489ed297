"""Drift in random episodes of every model family, with hostile observations.

python -m bench.drift                          # ten thousand episodes per family
python -m bench.drift --templates FOLDER       # the models' own templates: NAME.jinja, as in TRL's package

The bench checks that every prompt starts with all earlier ids, that unchanged histories match the template,
that observations add no control tokens, and that calls are parsed as written. The last column is a deliberate
drift: the share of wrong positions for a client that tokenises the history of the same episodes again. The
exit status is 1 if there is drift, or if the deliberate drift is not detected.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from prorl_envs.errors import InputError
from prorl_envs.model.tokens.rendering import TemplateRenderer
from tests.support.drift import DriftCounts, DriftEpisodes
from tests.support.families import TEMPLATES, family_renderer, renderer_of, templates_in

_HEAD = ("template", "calls", "compared", "episodes", "turns", "tokens", "drift", "tokenised again", "s")
_ROW = "| {:28} | {:9} | {:14} | {:>8} | {:>7} | {:>9} | {:>5} | {:>15} | {:>5} |"


def main() -> None:
    options = _options()
    print(_ROW.format(*_HEAD))
    print(_ROW.format(*("---" for _ in _HEAD)))
    bad = 0
    for name, make in _subjects(options.templates):
        if options.only and name not in options.only.split(","):
            continue
        try:
            episodes = DriftEpisodes(make(), options.seed)
        except InputError as error:
            print(f"{name}: {error.message}", file=sys.stderr)
            continue
        started = time.monotonic()
        for _ in range(options.episodes):
            episodes.play(options.turns)
        print(_row(name, episodes, time.monotonic() - started), flush=True)
        if episodes.counts.wrong or not episodes.counts.again:
            bad += 1
            print(episodes.counts, file=sys.stderr)
    sys.exit(bool(bad))


def _subjects(folder: Path | None) -> Iterator[tuple[str, Callable[[], TemplateRenderer]]]:
    if folder is None:
        yield from ((name, partial(family_renderer, name)) for name in TEMPLATES)
        return
    yield from ((name, partial(renderer_of, source)) for name, source in templates_in(folder).items())


def _row(name: str, episodes: DriftEpisodes, seconds: float) -> str:
    counts: DriftCounts = episodes.counts
    comparisons = (("calls", episodes.keeps_calls), ("text", episodes.keeps_answers))
    compared = [part for part, is_compared in comparisons if is_compared]
    again = f"{100 * counts.again / max(counts.tokens, 1):.0f} %"
    return _ROW.format(
        name,
        episodes.renderer.tool_format,
        ", ".join(compared) or "-",
        counts.episodes,
        counts.turns,
        counts.tokens,
        counts.wrong,
        again,
        f"{seconds:.0f}",
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.drift", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--episodes", type=int, default=10_000, help="episodes per family")
    parser.add_argument("--turns", type=int, default=4, help="largest number of turns of an episode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="names of templates, with commas")
    parser.add_argument(
        "--templates", type=Path, help="a folder of chat templates, instead of the built-in ones"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
