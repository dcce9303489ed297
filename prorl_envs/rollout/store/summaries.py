"""Summaries and text search of stored results. Neither uses the tokens."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from prorl_envs.rollout.api.types import Result
from prorl_envs.viewer.episodes import holds, needles
from prorl_envs.viewer.summary import Summary, summary_from

#: Arrays of a trajectory with one value per token. They are stored separately and not searched.
ARRAYS = ("ids", "loss_mask", "logprobs")
#: Approximate maximum of bytes that one step of a search reads.
STEP = 16 << 20


class SearchHits(NamedTuple):
    """Hits of one search step.

    Args:
        jobs: ids of the jobs whose result contains the text.
        next: cursor for the next step; equal to the requested cursor if the search is complete.
    """

    jobs: list[str]
    next: int


def summarise(result: Result) -> Summary:
    """Return the summary of a result. It is equal to `summary_of` of the result's JSON."""
    rows = result.rows
    return summary_from(result, rows, sum(len(row.ids) for row in rows))


def body_of(result: Result) -> bytes:
    """Return a result as JSON, without its cursor and the arrays of its trajectory."""
    return result.model_dump_json(exclude={"cursor": True, "trajectory": set(ARRAYS)}).encode()


def search_bodies(bodies: Iterable[tuple[int, bytes]], text: str, after: int) -> SearchHits:
    """Run one search step.

    Args:
        bodies: cursor and JSON of each result, in order of the cursors.
        text: text to find, see `EpisodeSource.search`.
        after: the cursor before these results.
    """
    patterns, jobs, searched_bytes = needles(text), [], 0
    for cursor, body in bodies:
        after, searched_bytes = cursor, searched_bytes + len(body)
        if holds(body, patterns):
            jobs.append(_JOB_ID.decode(body).job_id)
        if searched_bytes >= STEP:
            break
    return SearchHits(jobs, after)


class _JobId(msgspec.Struct):
    job_id: str


_JOB_ID = msgspec.json.Decoder(_JobId)
