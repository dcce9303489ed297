from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.tools.client.arguments import TEXT_LIMIT, complaint
from prorl_envs.tools.schemas import BASH, EDITOR, FINISH

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"command": "view", "path": "/a", "view_range": [1, -1]}, ""),
        ([], "must be an object"),
        ({}, "'command' is missing"),
        ({"command": "view"}, "'path' is missing"),
        ({"command": "view", "path": 3}, "'path' must be a string"),
        ({"command": "fly", "path": "/a"}, "must be one of: view, create"),
        ({"command": "view", "path": "/a", "speed": 1}, "unknown argument 'speed'"),
        ({"command": "view", "path": "/a", "insert_line": True}, "must be a whole number"),
        ({"command": "view", "path": "/a", "insert_line": 2**70}, "too large"),
        ({"command": "view", "path": "/a", "view_range": [1, "2"]}, "holds an item that must be a whole"),
        ({"command": "view", "path": "/a", "view_range": [1] * 2000}, "more than 1000 items"),
        ({"command": "view", "path": "/\ud800"}, "surrogate"),
        ({"command": "create", "path": "/a", "file_text": "x" * (TEXT_LIMIT + 1)}, "longer than"),
    ],
)
def test_an_error_message_names_the_wrong_argument(arguments: object, expected: str) -> None:
    said = complaint(EDITOR, arguments)
    assert expected in said
    assert bool(expected) == bool(said)


@given(JSON)
def test_any_input_gets_an_answer(arguments: Any) -> None:
    for spec in (BASH, EDITOR, FINISH):
        assert isinstance(complaint(spec, arguments), str)


def test_optional_arguments_may_be_left_out() -> None:
    assert complaint(FINISH, {}) == ""
    assert complaint(FINISH, {"answer": "42"}) == ""
