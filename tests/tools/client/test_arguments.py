from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.tools.client.arguments import INTEGER_LIMIT, TEXT_LIMIT, read_arguments
from prorl_envs.tools.schemas import BASH, EDITOR, FINISH

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "must be an object"),
        ({}, "'command' is missing"),
        ({"command": "view"}, "'path' is missing"),
        ({"command": "view", "path": 3}, "'path' must be a string"),
        ({"command": "fly", "path": "/a"}, "must be one of: view, create"),
        ({"command": "view", "path": "/a", "speed": 1}, "unknown argument 'speed'"),
        ({"command": "view", "path": None}, "'path' must be a string"),
        ({"command": "view", "path": "/a", "speed": None}, "unknown argument 'speed'"),
        ({"command": "view", "path": "/a", "insert_line": True}, "must be a whole number"),
        ({"command": "view", "path": "/a", "insert_line": 1.5}, "must be a whole number"),
        ({"command": "view", "path": "/a", "insert_line": float("nan")}, "must be a whole number"),
        ({"command": "view", "path": "/a", "insert_line": float("inf")}, "must be a whole number"),
        ({"command": "view", "path": "/a", "insert_line": "three"}, "must be a whole number"),
        ({"command": "view", "path": "/a", "insert_line": "9" * 5000}, "must be a whole number"),
        ({"command": "view", "path": "/a", "insert_line": '"3"'}, "must be a whole number"),
        ({"command": "view", "path": "/a", "insert_line": 1e300}, "too large"),
        ({"command": "view", "path": "/a", "view_range": "[" * 60_000}, "must be a list"),
        ({"command": "view", "path": "/a", "view_range": [1, None]}, "holds an item that must be a whole"),
        ({"command": "view", "path": "/a", "insert_line": 2**70}, "too large"),
        ({"command": "view", "path": "/a", "view_range": [1, "x"]}, "holds an item that must be a whole"),
        ({"command": "view", "path": "/a", "view_range": [1] * 2000}, "more than 1000 items"),
        ({"command": "view", "path": "/\ud800"}, "surrogate"),
        ({"command": "create", "path": "/a", "file_text": "x" * (TEXT_LIMIT + 1)}, "longer than"),
    ],
)
def test_an_error_message_names_the_wrong_argument(arguments: object, expected: str) -> None:
    said = read_arguments(EDITOR, arguments)
    assert isinstance(said, str)
    assert expected in said


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"view_range": [1, -1]}, {"view_range": [1, -1]}),
        # zenrows-mcp #23, modelcontextprotocol/inspector #328: null for "not given"
        ({"view_range": None, "old_str": None}, {}),
        # hermes-agent #5265, vllm #46237: other spellings of whole numbers and lists
        ({"insert_line": 3.0}, {"insert_line": 3}),
        ({"insert_line": -0.0}, {"insert_line": 0}),
        ({"insert_line": 1e2}, {"insert_line": 100}),
        ({"insert_line": float(INTEGER_LIMIT)}, {"insert_line": INTEGER_LIMIT}),
        ({"insert_line": "3"}, {"insert_line": 3}),
        ({"insert_line": " 3.0 "}, {"insert_line": 3}),
        ({"view_range": [1.0, 2]}, {"view_range": [1, 2]}),
        ({"view_range": "[1, 2]"}, {"view_range": [1, 2]}),
        ({"view_range": ["1", 2.0]}, {"view_range": [1, 2]}),
        ({"file_text": "3"}, {"file_text": "3"}),
        ({"file_text": "null"}, {"file_text": "null"}),
    ],
)
def test_what_a_model_plainly_means_is_read(given: dict[str, Any], read: dict[str, Any]) -> None:
    rest = {"command": "view", "path": "/a"}
    found = read_arguments(EDITOR, rest | given)
    assert found == rest | read
    assert repr(found) == repr(rest | read)  # 3, not 3.0


@pytest.mark.parametrize("written", [True, "true", "True", "TRUE"])
def test_a_truth_value_may_be_a_text(written: object) -> None:
    assert read_arguments(BASH, {"command": "ls", "restart": written}) == {"command": "ls", "restart": True}
    assert "true or false" in read_arguments(BASH, {"command": "ls", "restart": "yes"})


@given(JSON)
def test_any_input_gets_an_answer(arguments: Any) -> None:
    for spec in (BASH, EDITOR, FINISH):
        assert isinstance(read_arguments(spec, arguments), str | dict)


def test_optional_arguments_may_be_left_out() -> None:
    assert read_arguments(FINISH, {}) == {}
    assert read_arguments(FINISH, {"answer": "42"}) == {"answer": "42"}
