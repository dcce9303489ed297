"""Summaries and text search of stored results, without the tokens."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from prorl_envs.rollout.api.types import Result
from prorl_envs.viewer.episodes import holds, needles
from prorl_envs.viewer.summary import Summary, summary_from

#: Arrays per token, which are not searched.
ARRAYS = ("ids", "loss_mask", "logprobs")
#: Bytes of text that one step of a search reads at most, roughly.
STEP = 16 << 20


class SearchHits(NamedTuple):
    """Hits of one step of a search.

    Args:
        jobs: ids of the jobs whose result contains the text.
        next: cursor for the next step; equal to the given cursor if the search is complete.
    """

    jobs: list[str]
    next: int


def summarise(result: Result) -> Summary:
    """Return a summary of a result: the same as `summary_of` of its JSON."""
    rows = result.rows
    return summary_from(result, rows, sum(len(row.ids) for row in rows))


def body_of(result: Result) -> bytes:
    """Return a result as JSON, without its cursor and the arrays of its trajectory."""
    return result.model_dump_json(exclude={"cursor": True, "trajectory": set(ARRAYS)}).encode()


def look_through(bodies: Iterable[tuple[int, bytes]], text: str, after: int) -> SearchHits:
    """Search as many results as one step may read.

    Args:
        bodies: cursor and JSON of each result, in order.
        text: text to find, with the rules of `EpisodeSource.search`.
        after: the cursor before these results.
    """
    wanted, jobs, looked_at = needles(text), [], 0
    for cursor, body in bodies:
        after, looked_at = cursor, looked_at + len(body)
        if holds(body, wanted):
            jobs.append(_JOB.decode(body).job_id)
        if looked_at >= STEP:
            break
    return SearchHits(jobs, after)


class _Named(msgspec.Struct):
    job_id: str


_JOB = msgspec.json.Decoder(_Named)
