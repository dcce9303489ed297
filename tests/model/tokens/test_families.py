"""Model families: their calls, their turns, and prompts that start with all earlier tokens."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl_envs.errors import InputError
from prorl_envs.model.tokens.continuation import Append, Fork, next_prompt
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.model.types import Sampled
from tests.support.drift import TOOL, DriftEpisodes
from tests.support.families import TEMPLATES, family_renderer, renderer_of

NAMES = sorted(TEMPLATES)
TEXTS = st.lists(st.sampled_from(["<|im_end|>", "</s>", "<", "\n", "é"]) | st.text(max_size=4), max_size=5)


def sampled(ids: list[int]) -> Sampled:
    return Sampled(tuple(ids), (-0.5,) * len(ids), "stop", "", "")


def call_of(arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
    call = {"id": "abcdefgh1", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **more}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "name": "bash", "tool_call_id": "abcdefgh1", "content": text}


@pytest.mark.parametrize("name", NAMES)
def test_the_format_of_calls_is_detected(name: str) -> None:
    renderer = family_renderer(name)
    assert renderer.tool_format == ("hermes" if name == "plain" else name)
    assert renderer.plain_tools == (name == "plain")
    assert renderer.tools_known == (name not in ("plain", "deepseek"))
    shown = renderer.decode(renderer.prompt([{"role": "user", "content": "Go."}], [TOOL]))
    assert "bash" in shown and "Go." in shown


@pytest.mark.parametrize("name", NAMES)
@given(command=TEXTS.map("".join), count=st.integers(-9, 10**9))
@settings(max_examples=25)
def test_calls_written_by_the_template_are_parsed(name: str, command: str, count: int) -> None:
    renderer = family_renderer(name)
    ids = renderer.assistant(call_of({"command": f"a{command}a", "count": count}))
    assert ids[-1] in renderer.stop_ids
    (call,) = renderer.parse(ids, [TOOL]).tool_calls
    assert (call.name, call.arguments) == ("bash", {"command": f"a{command}a", "count": count})


@pytest.mark.parametrize("name", NAMES)
def test_only_a_client_that_tokenises_again_drifts(name: str) -> None:
    episodes = DriftEpisodes(family_renderer(name), seed=7)
    for _ in range(12):
        episodes.play()
    assert episodes.counts.wrong == 0, episodes.counts
    assert episodes.counts.again > 0


@pytest.mark.parametrize("name", NAMES)
@given(ids=st.lists(st.integers(0, 1100), max_size=12), closed=st.booleans(), text=TEXTS.map("".join))
@settings(max_examples=25)
def test_every_sampled_turn_is_closed_exactly_once(
    name: str, ids: list[int], closed: bool, text: str
) -> None:
    renderer = family_renderer(name)
    for observation in (result(text), {"role": "user", "content": text}):
        whole = renderer.decode(renderer.bridge(sampled([]), [observation]))
        harmless = renderer.assistant(call_of({"command": "x"}))[-1]
        answer = [*ids, harmless] if closed and observation["role"] == "tool" else [*ids, 0]
        bridge = renderer.decode(renderer.bridge(sampled(answer), [observation]))
        assert renderer.decode([harmless]) + bridge == whole or bridge == whole


def test_a_stop_token_may_open_the_next_turn() -> None:
    """GLM's stop token may be the first token of the next message."""
    renderer = family_renderer("glm")
    tool, user = (renderer.tokenizer.encode(text).ids for text in ("<|observation|>", "<|user|>"))
    assert set(renderer.stop_ids) == {*tool, *user}
    for stop, said in ((tool, "\n<tool_response>"), (user, "<|observation|>\n<tool_response>")):
        assert renderer.decode(renderer.bridge(sampled([5, *stop]), [result("x")])).startswith(said)


def test_harmony_closes_turns_with_three_tokens_and_messages_with_a_fourth() -> None:
    renderer = family_renderer("harmony")
    end, call, back = renderer.tokenizer.encode("<|end|><|call|><|return|>").ids
    assert renderer.stop_ids == (back, call)
    user = [{"role": "user", "content": "x"}]
    bridges = [renderer.bridge(sampled([5, stop]), user) for stop in (back, call, end)]
    assert renderer.decode(bridges[0]) == "<|start|>user<|message|>x<|end|><|start|>assistant"
    assert bridges[0] == bridges[1] == bridges[2]
    ids = renderer.tokenizer.encode("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant").ids
    turn = renderer.parse([*ids, *renderer.assistant(call_of({"command": "ls"}))], [TOOL])
    assert (turn.reasoning, turn.content, len(turn.tool_calls)) == ("Hm.", "", 1)


THINKING = [{"role": "user", "content": "Go."}, call_of({"command": "ls"}, reasoning_content="Hm.")]


def step(renderer: TemplateRenderer, reasoning: Any, new: dict[str, Any]) -> tuple[list[int], Append | Fork]:
    """Return the context with a thinking answer, and its continuation."""
    answer = sampled(renderer.assistant(THINKING[1]))
    context = [*renderer.prompt(THINKING[:1], [TOOL]), *answer.ids]
    messages = [*THINKING, new]
    return context, next_prompt(renderer, reasoning, context, answer, messages, 1, [TOOL])


def test_reasoning_is_kept_or_dropped_as_configured() -> None:
    """Qwen's template drops reasoning before a user message, so only a user message causes a fork."""
    renderer, user = family_renderer("coder"), {"role": "user", "content": "Go on."}
    context, kept = step(renderer, "keep", user)
    assert isinstance(kept, Append)
    for reasoning in ("user_turn", "template"):
        _, appended = step(renderer, reasoning, result("x"))
        assert isinstance(appended, Append), "within a tool cycle the template keeps it"
        _, forked = step(renderer, reasoning, user)
        assert isinstance(forked, Fork)
        assert "Hm." in renderer.decode([*context, *kept.ids])
        assert "Hm." not in renderer.decode(forked.ids)
        assert forked.ids == renderer.prompt([*THINKING, user], [TOOL])


def test_a_history_that_the_template_refuses_is_extended() -> None:
    strict = TEMPLATES["hermes"].replace(
        "{%- for m in messages %}\n    {%- if m.role == 'tool'",
        "{%- for m in messages %}{% if messages | length > 3 %}{{ raise_exception('long') }}{% endif %}\n"
        "    {%- if m.role == 'tool'",
    )
    renderer = renderer_of(strict)
    answer = sampled(renderer.assistant(THINKING[1]))
    messages = [*THINKING, result("x"), {"role": "user", "content": "x"}]
    with pytest.raises(InputError):
        renderer.prompt(messages)
    assert isinstance(next_prompt(renderer, "template", [5], answer, messages, 1, ()), Append)


def test_calls_in_an_unknown_format_are_refused_with_an_excerpt() -> None:
    odd = TEMPLATES["hermes"].replace("<tool_call>", "((").replace("</tool_call>", "))")
    with pytest.raises(InputError, match="in an unknown format") as caught:
        renderer_of(odd)
    assert "model.tool_format" in caught.value.hint
