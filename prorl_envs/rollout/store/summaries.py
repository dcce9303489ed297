"""Summaries and text search of stored results. Neither uses the tokens."""

from typing import NamedTuple

from prorl_envs.rollout.api.types import Result
from prorl_envs.viewer.summary import Summary, summary_from

#: Arrays of a trajectory with one value per token. They are stored separately and not searched.
ARRAYS = ("ids", "loss_mask", "logprobs")


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
