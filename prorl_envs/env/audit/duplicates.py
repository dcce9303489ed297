"""Tasks that are the same, or nearly so, within a set and between two."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from prorl_envs.env.audit.contents import grading_digest, shown_text
from prorl_envs.env.base import Environment, Task

#: Words of a shingle, hashes of a sketch, and the share of equal hashes of nearly equal texts: an estimate of
#: the share of equal shingles (Broder, "On the resemblance and containment of documents", 1997).
_WORDS, _SKETCH, _NEAR = 4, 64, 0.85
#: Tasks with a shingle in common, above which it is taken for a phrase of the whole set.
_COMMON = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Resemblance[TaskT: Task]:
    """Task that resembles an earlier one.

    Args:
        task, other: the tasks.
        name: id of the other one, and that it is of another set.
        same: whether both show the agent the same text; only letter case and white space may differ.
        graded_alike: whether both are graded in the same way.
    """

    task: TaskT
    other: TaskT
    name: str
    same: bool
    graded_alike: bool


def resemblances[TaskT: Task](
    family: type[Environment[Any]], tasks: Sequence[TaskT], against: Sequence[TaskT] = ()
) -> Iterator[Resemblance[TaskT]]:
    """Yield each task of `tasks` that resembles an earlier one, or one of `against`: it shows the same, or
    nearly the same and is graded in the same way."""
    by_hash: dict[int, list[int]] = defaultdict(list)
    seen: list[tuple[str, TaskT, int, frozenset[int], str]] = []
    others = ((f"{task.id} of the other set", task, False) for task in against)
    for name, task, own in (*others, *((task.id, task, True) for task in tasks)):
        words = re.findall(r"\w+|[^\w\s]", shown_text(family, task).lower())
        whole, sketch, graded = _hash(" ".join(words)), _sketch(words), grading_digest(family, task)
        shared: dict[int, int] = defaultdict(int)
        for value in sketch:
            for number in by_hash[value] if len(by_hash[value]) <= _COMMON else ():
                shared[number] += 1
            by_hash[value].append(len(seen))
        for number, count in shared.items() if own else ():
            other_name, other, other_whole, other_sketch, other_graded = seen[number]
            same, alike = other_whole == whole, other_graded == graded
            if same or (alike and count >= _NEAR * max(len(sketch), len(other_sketch))):
                yield Resemblance(task=task, other=other, name=other_name, same=same, graded_alike=alike)
                break
        seen.append((name, task, whole, sketch, graded))


def _sketch(words: Sequence[str]) -> frozenset[int]:
    """Return the smallest hashes of the text's shingles."""
    shingles = {" ".join(words[start : start + _WORDS]) for start in range(max(1, len(words) - _WORDS + 1))}
    return frozenset(sorted(map(_hash, shingles))[:_SKETCH])


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=8).digest())
