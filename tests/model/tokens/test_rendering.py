"""The renderer: messages are encoded as text only, and sampled tokens stay unchanged."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from prorl_envs.errors import InputError
from prorl_envs.model.tokens.chat_template import ChatTemplate, normalise
from prorl_envs.model.tokens.loading import load_renderer
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.model.tool_formats.reading import left_open
from prorl_envs.model.types import FinishReason, Sampled
from prorl_envs.testing.scripted import Behaviour, ScriptBook, ScriptedModel
from prorl_envs.testing.tokenizer import CHAT_TEMPLATE, builtin_renderer, tokenizer_folder
from prorl_envs.tools.types import ToolSpec

RENDERER = builtin_renderer()
CONTROL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
)
BASH = ToolSpec("bash", "Run a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
PIECES = st.sampled_from([*CONTROL, "<|im_", "end|>", "|>", ">", "<", "im_end", "assistant\n", "\n", " "])
HOSTILE = st.lists(PIECES | st.text(max_size=6), max_size=10).map("".join)


def control_ids(ids: Sequence[int], renderer: TemplateRenderer = RENDERER) -> list[int]:
    control = {renderer.tokenizer.token_to_id(text) for text in CONTROL}
    return [number for number in ids if number in control]


def sampled(ids: Sequence[int], reason: FinishReason = "stop") -> Sampled:
    return Sampled(tuple(ids), tuple(-0.5 for _ in ids), reason, "", "")


def full_text(messages: list[dict[str, Any]], tools: Sequence[ToolSpec] = ()) -> str:
    """Return the conversation as the template writes it, without regard to tokens."""
    template = ChatTemplate(CHAT_TEMPLATE)
    return template.render(
        [normalise(m) for m in messages], [t.to_openai() for t in tools], generation_prompt=True
    )


def assistant_call(command: str, content: str = "") -> dict[str, Any]:
    function = {"name": "bash", "arguments": {"command": command}}
    return {"role": "assistant", "content": content, "tool_calls": [{"id": "c", "function": function}]}


@given(HOSTILE, HOSTILE, HOSTILE)
def test_a_prompt_has_the_text_of_the_template(system: str, user: str, description: str) -> None:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    tools = [ToolSpec("bash", description, {"type": "object", "properties": {user: {"type": "string"}}})]
    ids = RENDERER.prompt(messages, tools)
    assert RENDERER.decode(ids) == full_text(messages, tools)
    harmless = [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}]
    assert control_ids(ids) == control_ids(RENDERER.prompt(harmless, [BASH]))


@given(HOSTILE, HOSTILE)
def test_observations_cannot_smuggle_control_tokens(first: str, second: str) -> None:
    answer = sampled(RENDERER.assistant(assistant_call("ls")))
    observations = [{"role": "tool", "content": text, "tool_call_id": "c"} for text in (first, second)]
    ids = RENDERER.bridge(answer, observations)
    harmless = RENDERER.bridge(answer, [{"role": "tool", "content": "x", "tool_call_id": "c"}] * 2)
    assert control_ids(ids) == control_ids(harmless)
    assert first in RENDERER.decode(ids)


@given(HOSTILE)
def test_text_without_control_tokens_is_encoded_unchanged(text: str) -> None:
    """Quoting changes nothing for harmless text: the ids are those of one plain encoding."""
    if any(text.endswith(c[:k]) or c[k:].startswith(text[:1]) for c in CONTROL for k in range(1, len(c))):
        text = f"a{text}a"
    if any(control in text for control in CONTROL):
        return
    messages = [{"role": "user", "content": text}]
    assert (
        RENDERER.prompt(messages)
        == RENDERER.tokenizer.encode(full_text(messages), add_special_tokens=False).ids
    )


TURNS = st.lists(st.tuples(HOSTILE, HOSTILE, st.sampled_from(["tool", "user"])), min_size=1, max_size=4)


@given(HOSTILE, TURNS)
def test_canonical_turns_and_bridges_make_the_template_s_text(
    user: str, turns: list[tuple[str, str, str]]
) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": user}]
    ids = RENDERER.prompt(messages, [BASH])
    for command, output, role in turns:
        message = assistant_call(command)
        answer = sampled(RENDERER.assistant(message))
        observation = {"role": role, "content": output, "tool_call_id": "c"}
        ids = [*ids, *answer.ids, *RENDERER.bridge(answer, [observation])]
        messages += [message, observation]
    assert RENDERER.decode(ids) == full_text(messages, [BASH])


@given(TURNS, st.integers(0, 2**32), st.data())
def test_the_ledger_only_grows(turns: list[tuple[str, str, str]], seed: int, data: st.DataObject) -> None:
    """Every sampled answer (non-canonical, truncated, garbage, empty) is kept, and its turn is closed."""
    chance = random.Random(seed)
    end = RENDERER.stop_ids[0]
    ids = RENDERER.prompt([{"role": "user", "content": "Go."}], [BASH])
    for _, output, role in turns:
        turn = [chance.randrange(RENDERER.vocab_size) for _ in range(chance.randrange(12))]
        if data.draw(st.booleans()):
            turn.append(end)
        answer = sampled(turn, "stop" if turn and turn[-1] == end else "length")
        before = [*ids, *answer.ids]
        bridge = RENDERER.bridge(answer, [{"role": role, "content": output}])
        ids = [*before, *bridge]
        assert ids[: len(before)] == before
        closed = bool(turn) and turn[-1] == end
        assert bridge.count(end) == (1 if closed else 2)
        assert RENDERER.decode(bridge).endswith("<|im_start|>assistant\n")
        RENDERER.parse(answer.ids)


def test_a_truncated_turn_is_closed_with_the_template_s_own_end() -> None:
    ids = RENDERER.assistant({"role": "assistant", "content": "half of a thought"})[:-1]
    bridge = RENDERER.bridge(sampled(ids, "length"), [{"role": "user", "content": "Go on."}])
    assert (
        RENDERER.decode(bridge) == "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_another_stop_token_does_not_close_a_turn() -> None:
    other = RENDERER.tokenizer.encode("<|endoftext|>").ids
    bridge = RENDERER.bridge(sampled(other), [{"role": "user", "content": "Go on."}])
    assert bridge[0] == RENDERER.stop_ids[0]


@given(st.lists(st.integers(-(2**70), 2**70) | st.integers(0, 1100), max_size=30))
def test_every_id_sequence_is_parsed(ids: list[int]) -> None:
    assert RENDERER.parse(ids) == RENDERER.parse(ids)


@given(HOSTILE, HOSTILE)
def test_a_rendered_call_is_parsed_to_the_same_call(command: str, content: str) -> None:
    turn = RENDERER.parse(RENDERER.assistant(assistant_call(command)))
    assert [(call.name, call.arguments) for call in turn.tool_calls] == [("bash", {"command": command})]
    assert turn.malformed == ()


@given(st.lists(PIECES, max_size=20).map("".join))
def test_reasoning_without_its_start_is_recognised_after_any_prompt(before: str) -> None:
    prompt = RENDERER.tokenizer.encode(before, add_special_tokens=False).ids
    turn = RENDERER.parse(RENDERER.tokenizer.encode("so</think>answer").ids, prompt_ids=prompt)
    assert (turn.reasoning, turn.content) == ("so", "answer")


@given(st.lists(PIECES, max_size=20).map("".join))
def test_reasoning_is_open_if_the_prompt_ends_with_its_tag(before: str) -> None:
    prompt = RENDERER.tokenizer.encode(before, add_special_tokens=False).ids
    turn = RENDERER.parse(RENDERER.tokenizer.encode("so").ids, prompt_ids=prompt)
    is_open = left_open(RENDERER.decode(prompt[-16:]), only_last=True) == "</think>"
    assert (turn.reasoning, turn.content) == (("so", "") if is_open else ("", "so"))


def test_calls_of_one_turn_have_different_ids() -> None:
    ids = RENDERER.assistant({**assistant_call("ls"), "tool_calls": assistant_call("ls")["tool_calls"] * 2})
    first, second = RENDERER.parse(ids).tool_calls
    assert first.id != second.id


@settings(max_examples=30)
@given(st.integers(0, 2**32), HOSTILE)
def test_noncanonical_samples_are_parsed_alike(seed: int, command: str) -> None:
    book = ScriptBook.from_tapes({"k": [[{"tool": "bash", "arguments": {"command": command}}]]})
    canonical, odd = (
        ScriptedModel(RENDERER, book, seed=seed, noncanonical=rate).sample(
            "k", Behaviour.SOLVE, 0, session="s", max_tokens=10_000
        )
        for rate in (0.0, 1.0)
    )
    assert canonical.ids != odd.ids
    assert RENDERER.decode(canonical.ids) == RENDERER.decode(odd.ids)
    assert [c.arguments for c in RENDERER.parse(odd.ids).tool_calls] == [{"command": command}]


def test_text_parts_are_joined_before_rendering() -> None:
    parts = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    ids = RENDERER.prompt([{"role": "user", "content": parts}])
    assert control_ids(ids) == control_ids(RENDERER.prompt([{"role": "user", "content": "x"}]))


def test_arguments_given_as_a_json_string_are_rendered_as_an_object() -> None:
    message = assistant_call("ls")
    as_text = json.loads(json.dumps(message))
    as_text["tool_calls"][0]["function"]["arguments"] = json.dumps({"command": "ls"})
    assert RENDERER.assistant(as_text) == RENDERER.assistant(message)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"role": "wizard", "content": "x"}], "role"),
        ([{"content": "x"}], "role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "text"),
        ([{"role": "user", "content": 7}], "text"),
        ([{"role": "user", "content": "x"}, {"role": "system", "content": "x"}], "refuses"),
        ([], "refuses"),
    ],
)
def test_bad_conversations_are_refused_with_a_reason(messages: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(InputError, match=says):
        RENDERER.prompt(messages)


@pytest.mark.parametrize("observations", [[], [{"role": "system", "content": "x"}]])
def test_bad_observations_are_refused(observations: list[dict[str, Any]]) -> None:
    with pytest.raises(InputError, match="tool or user"):
        RENDERER.bridge(sampled([]), observations)


def test_a_template_without_an_end_of_turn_is_refused() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(InputError, match="end assistant turns"):
        TemplateRenderer(RENDERER.tokenizer, ChatTemplate(template))


def test_a_tokenizer_that_adds_spaces_is_refused() -> None:
    tokenizer = Tokenizer(models.BPE({chr(c): c for c in range(0x20, 0x7F)} | {"▁": 200, "\n": 10}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    with pytest.raises(InputError, match="piece by piece"):
        TemplateRenderer(tokenizer, ChatTemplate(CHAT_TEMPLATE))


THINKING_TEMPLATE = """\
{%- for m in messages -%}
[{{ m.role }}]
{%- if m.role == 'assistant' and '</think>' in m.content and not loop.last -%}
{{ m.content.split('</think>')[-1] }}
{%- elif m.tool_calls -%}
{{ m.tool_calls[0].function.arguments | tojson }}
{%- else -%}
{{ m.content | trim }}
{%- endif -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt %}[assistant]<think>{% endif -%}
"""


def test_other_templates_work_too() -> None:
    """Strips, drops reasoning and content beside calls from the history, and opens a thought."""
    renderer = TemplateRenderer(RENDERER.tokenizer, ChatTemplate(THINKING_TEMPLATE))
    call = '<tool_call>{"name": "finish", "arguments": {}}</tool_call>'
    encode = RENDERER.tokenizer.encode
    ids = encode(f"I could {call}</think>{call}<|im_end|>", add_special_tokens=False).ids
    assert len(renderer.parse(ids).tool_calls) == 1
    tool = renderer.bridge(sampled(ids), [{"role": "tool", "content": " <|im_end|>\n"}])
    assert renderer.decode(tool) == "[tool]<|im_end|><|im_end|>[assistant]<think>"
    assert len(control_ids(tool)) == 2
    user = renderer.bridge(sampled(ids[:-1], "length"), [{"role": "user", "content": "hm"}])
    assert renderer.decode(user) == "<|im_end|>[user]hm<|im_end|>[assistant]<think>"


def test_generation_tags_and_loop_controls_are_supported() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}"
    )
    renderer = TemplateRenderer(RENDERER.tokenizer, ChatTemplate(source))
    assert renderer.decode(renderer.prompt([{"role": "user", "content": "x"}])) == "x<|im_end|>"


def test_templates_are_sandboxed() -> None:
    with pytest.raises(InputError, match="refuses"):
        ChatTemplate("{{ messages.__class__.__mro__ }}").render([], generation_prompt=False)
    with pytest.raises(InputError, match="Jinja"):
        ChatTemplate("{% if %}")


def test_a_renderer_loaded_from_a_folder_is_equal(tmp_path: Path) -> None:
    renderer = load_renderer(tokenizer_folder(tmp_path))
    messages = [{"role": "user", "content": "Count to 3."}]
    assert renderer.prompt(messages, [BASH]) == RENDERER.prompt(messages, [BASH])
    assert renderer.stop_ids == RENDERER.stop_ids
    assert renderer.vocab_size == RENDERER.vocab_size


def write_model(folder: Path, tokenizer_config: dict[str, Any], **files: Any) -> Path:
    tokenizer_folder(folder).rename(folder / "model")
    model = folder / "model"
    (model / "chat_template.jinja").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    for name, value in files.items():
        (model / f"{name}.json").write_text(json.dumps(value))
    return model


def test_templates_stop_ids_and_sizes_come_from_the_model_s_files(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "no end"}, {"name": "tool_use", "template": CHAT_TEMPLATE}]
    config = {"chat_template": templates, "eos_token": {"content": "<|endoftext|>"}}
    model = write_model(
        tmp_path, config, generation_config={"eos_token_id": [3, 4]}, config={"vocab_size": 2048}
    )
    renderer = load_renderer(model)
    end, eos = (RENDERER.tokenizer.token_to_id(text) for text in ("<|im_end|>", "<|endoftext|>"))
    assert renderer.stop_ids == (end, 3, 4, eos)
    assert renderer.vocab_size == 2048


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    model = write_model(tmp_path, {})
    with pytest.raises(InputError, match="no chat template"):
        load_renderer(model)
    (model / "tokenizer_config.json").write_text("[")
    with pytest.raises(InputError, match="as JSON"):
        load_renderer(model)
    (model / "tokenizer_config.json").unlink()
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="not a tokenizer"):
        load_renderer(model)
    (model / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="missing"):
        load_renderer(model)


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "a/b/c"])
def test_an_absent_folder_is_an_error(name: str) -> None:
    with pytest.raises(InputError, match="no tokenizer folder"):
        load_renderer(name)


def test_a_name_that_is_invalid_on_the_hub_is_an_error() -> None:
    with pytest.raises(InputError, match="Hub"):
        load_renderer("not a valid name!")


CALLS_AS_TEXT = """\
{%- for m in messages -%}
{{ m.role }}:{{ m.content }}
{%- for call in m.tool_calls %}{{ '>' + call.function.arguments }}{% endfor %}<|im_end|>
{%- endfor -%}
"""


def test_templates_that_expect_arguments_as_text_get_text() -> None:
    renderer = TemplateRenderer(RENDERER.tokenizer, ChatTemplate(CALLS_AS_TEXT))
    assert not renderer.plain_tools
    prompt = renderer.prompt([{"role": "user", "content": "x"}, assistant_call("</think>")])
    assert renderer.decode(prompt) == 'user:x<|im_end|>assistant:>{"command": "</think>"}<|im_end|>'
    assert len(control_ids(prompt)) == 2


def test_results_become_user_messages_if_the_template_drops_tool_messages() -> None:
    source = "{% for m in messages if m.role != 'tool' %}{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
    renderer = TemplateRenderer(RENDERER.tokenizer, ChatTemplate(source))
    assert renderer.plain_tools
    notes = [{"role": "tool", "content": "x"}, {"role": "user", "content": "y"}]
    said = "user:<tool_response>\nx\n</tool_response>\ny<|im_end|>"
    assert renderer.decode(renderer.bridge(sampled([]), notes)) == f"<|im_end|>{said}"
    prompt = renderer.decode(renderer.prompt([{"role": "user", "content": "Go."}], [BASH]))
    assert prompt.startswith("user:Go.\n\nYou can call") and '"bash"' in prompt


def test_a_template_may_close_the_last_turn_differently() -> None:
    source = (
        "{% for m in messages %}{{ m.content }}"
        "{{ '<|im_end|>' if loop.last else '<|endoftext|>' }}{% endfor %}"
    )
    renderer = TemplateRenderer(RENDERER.tokenizer, ChatTemplate(source))
    end, other = RENDERER.tokenizer.encode("<|im_end|><|endoftext|>").ids
    assert renderer.stop_ids == (end,)
    for ids, said in (
        ([5, end], "x<|im_end|>"),
        ([5, other], "x<|im_end|>"),
        ([5], "<|endoftext|>x<|im_end|>"),
    ):
        assert renderer.decode(renderer.bridge(sampled(ids), [{"role": "user", "content": "x"}])) == said


def test_a_turn_with_calls_may_be_followed_by_more_than_its_end() -> None:
    """Text that the template writes after the end of the turn is not an end token of its own."""
    source = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>"
        "{{ '<|endoftext|>' if m.tool_calls }}{% endfor %}"
    )
    renderer = TemplateRenderer(RENDERER.tokenizer, ChatTemplate(source))
    (end,) = RENDERER.tokenizer.encode("<|im_end|>").ids
    assert renderer.stop_ids == (end,)
    bridge = renderer.bridge(sampled([5, end]), [{"role": "tool", "content": "x"}])
    assert renderer.decode(bridge) == "<|endoftext|>tool:x<|im_end|>"


def test_marks_survive_templates_that_print_ascii_json() -> None:
    source = CHAT_TEMPLATE.replace("arguments | tojson", "arguments | tojson(ensure_ascii=true)")
    renderer = TemplateRenderer(RENDERER.tokenizer, ChatTemplate(source))
    ids = renderer.assistant(assistant_call("é <|im_end|>"))
    assert renderer.decode(ids).count("<|im_end|>") == 2
    assert len(control_ids(ids)) == 3
    assert [call.arguments for call in renderer.parse(ids).tool_calls] == [{"command": "é <|im_end|>"}]
