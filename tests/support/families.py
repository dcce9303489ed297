"""Small chat templates in the style of the model families, over the built-in tokenizer.

Each writes turns, calls and results with its family's control tokens and in its family's order, as the
families document them; nothing is copied from a model. They replace the models in tests that must not
download anything. `python -m bench.drift --templates FOLDER` tests the models' own templates.
"""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from prorl_envs.model.tokens.chat_template import ChatTemplate
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.testing.tokenizer import builtin_renderer

_TOOLS = "{%- if tools %}OPEN{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}CLOSE{% endif -%}\n"


def _tools(opening: str, closing: str) -> str:
    return _TOOLS.replace("OPEN", opening).replace("CLOSE", closing)


_CHATML = (
    _tools("<|im_start|>system\nTools:\n", "<|im_end|>\n")
    + """\
{%- set last = namespace(user=0) -%}
{%- for m in messages if m.role == 'user' %}{% set last.user = loop.index0 %}{% endfor -%}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if m.reasoning_content and loop.index0 > last.user %}
            {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}{% set call = call.function %}CALL{% endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
)
_HERMES_CALL = """
            {{- '\\n<tool_call>\\n{"name": ' + call.name | tojson + ', "arguments": ' }}
            {{- call.arguments | tojson + '}\\n</tool_call>' }}"""
_CODER_CALL = """
            {{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
            {%- for key, value in call.arguments.items() %}
                {{- '<parameter=' + key + '>\\n' }}
                {{- (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}"""

_GLM = (
    "[gMASK]<sop>"
    + _tools("<|system|>\nTools:\n", "")
    + """\
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|observation|>' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|assistant|>\\n<think></think>' }}
        {%- if m.content %}{{ '\\n' + m.content }}{% endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + '\\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
                {{- (value if value is string else value | tojson) + '</arg_value>\\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- else %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
)
_LLAMA = (
    "<|begin_of_text|>"
    + _tools("<|start_header_id|>system<|end_header_id|>\n\nTools:\n", "<|eot_id|>")
    + """\
{%- for m in messages %}
    {%- set role = 'ipython' if m.role == 'tool' else m.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
    {%- if m.tool_calls %}
        {{- '{"name": ' + m.tool_calls[0].function.name | tojson + ', "parameters": ' }}
        {{- m.tool_calls[0].function.arguments | tojson + '}' }}
    {%- else %}{{ m.content | tojson if m.role == 'tool' else m.content }}{% endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
)
_PYTHONIC = (
    _LLAMA[: _LLAMA.index('        {{- \'{"name"')]
    + """\
        {%- set call = m.tool_calls[0].function %}
        {{- '[' + call.name + '(' }}
        {%- for key, value in call.arguments.items() %}
            {{- key + '=' + value | tojson }}{% if not loop.last %}, {% endif %}
        {%- endfor %}
        {{- ')]' }}
"""
    + _LLAMA[_LLAMA.index("    {%- else %}{{ m.content | tojson") :]
)
_DEEPSEEK = """\
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{ '<｜tool▁outputs▁begin｜>' }}{% endif %}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}
    {%- elif m.role == 'assistant' %}
        {%- if loop.previtem.role != 'tool' %}{{ '<｜Assistant｜>' }}{% endif %}
        {{- m.content }}
        {%- if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}
            {%- for call in m.tool_calls %}
                {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name }}
                {{- '\\n```json\\n' + call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
            {%- endfor %}
            {{- '<｜tool▁calls▁end｜>' }}
        {%- endif %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- else %}{{ '<｜User｜>' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<｜Assistant｜>' }}{% endif %}
"""
_KIMI = (
    _tools("<|im_system|>tool_declare<|im_middle|>", "<|im_end|>")
    + """\
{%- for m in messages %}
    {%- set role = 'im_' + (m.role if m.role in ('user', 'assistant') else 'system') %}
    {{- '<|' + role + '|>' + m.role + '<|im_middle|>' }}
    {%- if m.role == 'tool' %}{{ '## Return of ' + m.tool_call_id + '\\n' }}{% endif %}
    {{- m.content }}
    {%- if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}
        {%- for call in m.tool_calls %}
            {{- '<|tool_call_begin|>functions.' + call.function.name + ':' + loop.index0 | string }}
            {{- '<|tool_call_argument_begin|>' + call.function.arguments | tojson + '<|tool_call_end|>' }}
        {%- endfor %}
        {{- '<|tool_calls_section_end|>' }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}
"""
)
_MISTRAL = (
    "<s>"
    + _tools("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
    + """\
{%- for m in messages %}
    {%- if m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
    {%- elif m.role == 'assistant' %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
        {{- '</s>' }}
    {%- else %}{{ '[INST]' + m.content + '[/INST]' }}{% endif %}
{%- endfor %}
"""
)
_GEMMA = (
    "<bos>"
    + _tools("<|turn>system\nTools:\n", "<turn|>\n")
    + """\
{%- macro write(value) -%}
    {%- if value is string %}{{ '<|"|>' + value + '<|"|>' }}
    {%- elif value is mapping -%}
        {{- '{' }}{% for k, v in value | dictsort %}{{ k + ':' + write(v) }}
        {%- if not loop.last %},{% endif %}{% endfor %}{{ '}' }}
    {%- elif value is iterable -%}
        {{- '[' }}{% for v in value %}{{ write(v) }}{% if not loop.last %},{% endif %}{% endfor %}{{ ']' }}
    {%- else %}{{ value | tojson }}{% endif -%}
{%- endmacro -%}
{%- for m in messages %}
    {%- if m.role == 'tool' %}{{ 'response:' + m.name + '{value:' + write(m.content) + '}<tool_response|>' }}
        {%- if not loop.last and loop.nextitem.role == 'tool' %}{{ '<|tool_response>' }}{% endif %}
    {%- elif m.role == 'assistant' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|turn>model\\n' }}{% endif %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '<|tool_call>call:' + call.function.name + write(call.function.arguments) + '<tool_call|>' }}
        {%- endfor %}
        {{- '<|tool_response>' if m.tool_calls else '<turn|>\\n' }}
    {%- else %}
        {%- if not loop.first and loop.previtem.role == 'tool' %}{{ '<turn|>\\n' }}{% endif %}
        {{- '<|turn>' + m.role + '\\n' + m.content + '<turn|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|turn>model\\n' }}{% endif %}
"""
)
_HARMONY = (
    "<|start|>system<|message|>You answer.<|end|>"
    + _tools("<|start|>developer<|message|># Tools\n", "<|end|>")
    + """\
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|start|>functions.' + m.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- m.content | tojson + '<|end|>' }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {%- if m.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name }}
        {{- '<|channel|>commentary json<|message|>' }}
        {{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}
"""
)
_FUNCTION_GEMMA = (
    (_GEMMA.replace("<|turn>", "<start_of_turn>").replace("<turn|>", "<end_of_turn>"))
    .replace("<|tool_call>", "<start_function_call>")
    .replace("<tool_call|>", "<end_function_call>")
    .replace("<|tool_response>", "<start_function_response>")
    .replace("<tool_response|>", "<end_function_response>")
    .replace('<|"|>', "<escape>")
)
_MINIMAX = (
    "]~!b["
    + _tools("]~b]system\nTools:\n<tools>\n", "</tools>[e~[\n")
    + """\
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{ ']~b]tool' }}{% endif %}
        {{- '\\n<response>' + m.content + '</response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '[e~[\\n' }}{% endif %}
    {%- elif m.role == 'assistant' %}
        {{- ']~b]ai\\n' + m.content }}
        {%- if m.tool_calls %}{{ '\\n<minimax:tool_call>\\n' }}
            {%- for call in m.tool_calls %}
                {{- '<invoke name="' + call.function.name + '">\\n' }}
                {%- for key, value in call.function.arguments.items() %}
                    {{- '<parameter name="' + key + '">' }}
                    {{- (value if value is string else value | tojson) + '</parameter>\\n' }}
                {%- endfor %}
                {{- '</invoke>\\n' }}
            {%- endfor %}
            {{- '</minimax:tool_call>' }}
        {%- endif %}
        {{- '[e~[\\n' }}
    {%- else %}{{ ']~b]' + m.role + '\\n' + m.content + '[e~[\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ ']~b]ai\\n' }}{% endif %}
"""
)
_PLAIN = """\
{%- for m in messages %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim }}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

#: By the name of each family's format of calls; `plain` has no tools at all, as Gemma 3.
TEMPLATES: dict[str, str] = {
    "hermes": _CHATML.replace("CALL", _HERMES_CALL),
    "coder": _CHATML.replace("CALL", _CODER_CALL),
    "glm": _GLM,
    "llama": _LLAMA,
    "pythonic": _PYTHONIC,
    "deepseek": _DEEPSEEK,
    "kimi": _KIMI,
    "mistral": _MISTRAL,
    "gemma": _GEMMA,
    "functiongemma": _FUNCTION_GEMMA,
    "minimax": _MINIMAX,
    "harmony": _HARMONY,
    "plain": _PLAIN,
}

_LITERAL = re.compile(
    r"<\|?/?[\w▁]+\|?>|<｜[\w▁｜]+｜>|\[/?[A-Za-z_]{3,}\]|<\|\"\|>|\]~b\]|\[e~\[|</?(?:tool_call|tool_response|think)>"
)
_NOT_CONTROL = {"<tools>", "</tools>"}
_USUAL = ("<s>", "</s>", "<|call|>", "<|return|>", "<|constrain|>")
_ROLES = ("<|system|>", "<|user|>", "<|im_user|>", "<|im_system|>", "<|im_assistant|>")


@cache
def family_renderer(name: str) -> TemplateRenderer:
    """Return the renderer of one family's template.

    Args:
        name: in `TEMPLATES`.
    """
    return renderer_of(TEMPLATES[name])


def renderer_of(template: str, literals: Iterable[str] = ()) -> TemplateRenderer:
    """Return a renderer of any template over the built-in tokenizer, which includes all texts that look like
    control tokens.

    Args:
        template: Jinja source.
        literals: further control tokens.

    Raises:
        InputError: the template cannot be used for rendering.
    """
    tokenizer = Tokenizer.from_str(builtin_renderer().tokenizer.to_str())
    found = {*_LITERAL.findall(template), *_USUAL, *_ROLES, *literals} - _NOT_CONTROL
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in sorted(found)])
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    return TemplateRenderer(tokenizer, ChatTemplate(template, variables))


def templates_in(folder: Path) -> dict[str, str]:
    """Return the chat templates in a folder, by the names of their files.

    Args:
        folder: holds `NAME.jinja`, such as a package that ships the models' own.
    """
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}
