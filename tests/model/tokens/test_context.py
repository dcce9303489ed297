"""A context's ids and its JSON grow together."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.model.tokens.context import Context, ids_json

IDS = st.lists(st.integers(0, 2**40), max_size=5)


@given(st.lists(st.tuples(IDS, st.booleans()), max_size=8))
def test_the_json_of_a_context_is_that_of_its_ids(steps: list[tuple[list[int], bool]]) -> None:
    context, ids = Context(), list[int]()
    for new, asked in steps:
        context.extend(new)
        ids += new
        if asked:  # in between, or only at the end
            assert context.json() == msgspec.json.encode(ids)
    assert ids_json(context) == ids_json(ids) == ids_json(tuple(ids)) == msgspec.json.encode(ids)
    assert (list(context), len(context), context[1:3]) == (ids, len(ids), ids[1:3])


@given(st.lists(st.tuples(st.integers(0, 9), IDS, st.booleans(), st.booleans()), max_size=12))
def test_copies_of_a_context_grow_independently(steps: list[tuple[int, list[int], bool, bool]]) -> None:
    known = [(Context([7]), [7])]
    for which, new, forks, asked in steps:
        context, ids = known[which % len(known)]
        if forks:
            context, ids = context.fork(), list(ids)
            known.append((context, ids))
        context.extend(new)
        ids += new
        if asked:
            context.json()
    for context, ids in known:
        assert list(context) == ids and len(context) == len(ids)
        assert context.json() == msgspec.json.encode(ids)
        assert (context[-1], context[0], context[-2:], context[::-1]) == (
            ids[-1],
            ids[0],
            ids[-2:],
            ids[::-1],
        )
