"""What an agent said last, in the shapes of the Responses API."""

from types import SimpleNamespace as Item
from typing import Any

import pytest

from prorl_envs.nemo.words import last_words


def message(*texts: str, role: str = "assistant") -> Item:
    return Item(type="message", role=role, content=[Item(type="output_text", text=text) for text in texts])


CALL, RESULT, THOUGHT = Item(type="function_call"), Item(type="function_call_output"), Item(type="reasoning")


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ([message("a", "b")], "ab"),
        ([CALL, RESULT, THOUGHT, message("a")], "a"),
        ([message("a"), THOUGHT, message("b")], "a\nb"),
        ([Item(type="message", role="assistant", content="a")], "a"),
        ([message("a"), CALL], ""),
        ([message("a"), CALL, RESULT], ""),
        ([message("a", role="user")], ""),
        ([Item(type="message", role="assistant", content=[Item(type="refusal")])], ""),
        ([], ""),
    ],
)
def test_the_messages_at_the_end(output: list[Any], words: str) -> None:
    assert last_words(output) == words
