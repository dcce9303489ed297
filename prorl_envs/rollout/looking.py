"""What lists and searches read of stored results: in short, and as text, without the tokens."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from prorl_envs.rollout.types import Result
from prorl_envs.viewer.episodes import holds, needles
from prorl_envs.viewer.summary import Summary, summary_from

#: The numbers of each token, which nobody searches in.
ARRAYS = ("ids", "loss_mask", "logprobs")
#: Bytes of text that one step of a search looks into at most, roughly.
STEP = 16 << 20


class Hits(NamedTuple):
    """What a step of a search came to.

    Args:
        jobs: ids of those whose result has the text.
        next: cursor to go on with; where nothing is left to look at, the one that was given.
    """

    jobs: list[str]
    next: int


def summarise(result: Result) -> Summary:
    """A result in short: the same as `summary_of` of its JSON."""
    rows = result.rows
    return summary_from(result, rows, sum(len(row.ids) for row in rows))


def body_of(result: Result) -> bytes:
    """A result as JSON, without its cursor and the arrays of its trajectory."""
    return result.model_dump_json(exclude={"cursor": True, "trajectory": set(ARRAYS)}).encode()


def look_through(bodies: Iterable[tuple[int, bytes]], text: str, after: int) -> Hits:
    """Search in results, as many as one step may.

    Args:
        bodies: cursor and JSON of each, in order.
        text: what to look for, as `Episodes.search` does.
        after: the cursor that they come after.
    """
    wanted, jobs, looked_at = needles(text), [], 0
    for cursor, body in bodies:
        after, looked_at = cursor, looked_at + len(body)
        if holds(body, wanted):
            jobs.append(_JOB.decode(body).job_id)
        if looked_at >= STEP:
            break
    return Hits(jobs, after)


class _Named(msgspec.Struct):
    job_id: str


_JOB = msgspec.json.Decoder(_Named)
