"""Parsing of actions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.gym.actions import EXAMPLE, ActionError, parse_action


def test_a_tool_call() -> None:
    call = parse_action(EXAMPLE, "c1")
    assert call is not None
    assert (call.id, call.name, call.arguments) == ("c1", "bash", {"command": "ls"})


@pytest.mark.parametrize("text", ["", "ls", "[]", "null", "[" * 100_000], ids=range(5))
def test_an_answer_without_a_call(text: str) -> None:
    assert parse_action(text, "c1") is None


@pytest.mark.parametrize(
    "text",
    [
        " {",
        '{"name": "bash"}',
        '{"name": 1, "arguments": {}}',
        '{"name": "a", "arguments": "{}"}',
        '{"name": "a", "arguments": {}, "more": 1}',
        '{"name": ' * 100_000,
        '{"name": "a", "arguments": {"n": ' + "9" * 5000 + "}}",
        '{"name": "a", "arguments": {"n": 1e400}}',
        '{"name": "a", "arguments": {"n": NaN}}',
    ],
    ids=range(9),
)
def test_an_unreadable_call_explains_how_to_call_a_tool(text: str) -> None:
    with pytest.raises(ActionError, match="tool call"):
        parse_action(text, "c1")


@given(st.text(max_size=200))
def test_parsing_never_raises(text: str) -> None:
    assert parse_action(f"x{text}", "c1") is None
    with pytest.raises(ActionError):
        parse_action(f"{{{text}", "c1")
