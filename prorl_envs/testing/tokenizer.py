"""Small tokenizer and chat template, built without a download; the ids are the same on every machine.

The tokenizer is a byte-level BPE trained on a page of text, with control tokens and a tool-calling template
in the ChatML format of Qwen and other models. It has the properties of larger tokenizers that matter to a
ledger of tokens. A text has several tokenisations, hostile output can contain the text of a control token,
and any bytes can be encoded.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from hashlib import blake2s
from importlib.metadata import version
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from prorl_envs.model.tokens.chat_template import ChatTemplate
from prorl_envs.model.tokens.rendering import TemplateRenderer

VOCAB_SIZE = 1024
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
# Control tokens that the model writes. They are not "special" tokens, so decoding does not remove them.
_STRUCTURE = ("<think>", "</think>", "<tool_call>", "</tool_call>")

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- 'You can call these functions, each given as a JSON schema:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
    {{- 'Call one like this:\\n<tool_call>\\n{"name": "NAME", "arguments": {...}}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('a system message can only be the first') }}
    {%- elif message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {{- '<tool_call>\\n{"name": ' + call.function.name | tojson + ', "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_CORPUS = """\
The agent reads the task, looks at the files in the working directory, and decides what to do next.
Each command runs in a shell that keeps its state; the output comes back as the result of the tool.
When the tests pass and the work is done, call finish. If a command fails, read the error message first.
Write a program that reads numbers from a file and prints their sum, mean and largest value to stdout.
Find the line where the function returns the wrong value, change it, and run the test suite again.
You can call these functions, each given as a JSON schema. Call one like this:
{"name": "bash", "arguments": {"command": "ls -la && cat README.md"}}
{"name": "python", "arguments": {"code": "import math\\nprint(math.sqrt(2))"}}
{"name": "edit", "arguments": {"path": "/workspace/main.py", "old": "return 0", "new": "return 1"}}
{"name": "finish", "arguments": {}}
{"type": "function", "function": {"name": "bash", "description": "Run a command", "parameters":
{"type": "object", "properties": {"command": {"type": "string", "description": "the command"}},
"required": ["command"], "additionalProperties": false}}}
#!/bin/bash
set -euo pipefail
for file in *.txt; do grep -n "pattern" "$file" | sort -u | head -20 > /tmp/output; done
if [ -d "$HOME/project" ]; then cd "$HOME/project" && git status && git diff --stat; else mkdir -p project; fi
find . -name '*.py' -type f | xargs wc -l | awk '{ total += $1 } END { print total }'
echo "hello world" | sed 's/hello/goodbye/' | tr 'a-z' 'A-Z'; python3 -m pytest -q tests/ ; chmod +x run.sh
def load(path: str, encoding: str = "utf-8") -> dict[str, int]:
    \"\"\"Return how often each word occurs in the file.\"\"\"
    counts = {}
    with open(path, encoding=encoding) as file:
        for line in file:
            for word in line.strip().lower().split():
                counts[word] = counts.get(word, 0) + 1
    return counts
class Stack:
    def __init__(self, items=None):
        self.items = list(items or [])
    def push(self, item): self.items.append(item)
    def pop(self):
        if not self.items:
            raise IndexError("pop from an empty stack")
        return self.items.pop()
import json, sys, os, re, math
import numpy as np
import pandas as pd
values = np.array([1.5, 2.5, 3.5]); frame = pd.DataFrame({"name": ["a", "b"], "value": [1, 2]})
print(frame.groupby("name")["value"].sum(), values.mean(), sep="\\n")
Traceback (most recent call last):
  File "/workspace/main.py", line 12, in <module>
    result = compute(data)
TypeError: unsupported operand type(s) for +: 'int' and 'str'
assert compute([1, 2, 3]) == 6, "the sum of the list"
--- a/src/module.py
+++ b/src/module.py
@@ -10,7 +10,7 @@ def compute(values):
-    return sum(values) / 0
+    return sum(values) / len(values)
total 48
drwxr-xr-x 2 user user 4096 Jan  1 00:00 .
-rw-r--r-- 1 user user  220 Jan  1 00:00 main.py
0 1 2 3 4 5 6 7 8 9 10 11 12 16 20 32 64 100 128 256 512 1000 1024 2024 2025 3.14 0.5 1e-6
"""


def save_tokenizer(
    folder: Path, corpus: str = _CORPUS, *, whole: Sequence[str] = (), template: str = CHAT_TEMPLATE
) -> None:
    """Train a tokenizer and write it to `folder` as tokenizer.json, tokenizer_config.json and
    chat_template.jinja. Programs that read Hugging Face tokenizers can load the folder.

    Args:
        corpus: training text; the vocabulary has at most `VOCAB_SIZE` tokens.
        whole: texts of several words that may become one token each. If there are any, digits and punctuation
            are tokens of one character.
        template: chat template.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _train(corpus, whole).save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def tokenizer_folder(cache_folder: Path | None = None) -> Path:
    """Return a folder with the tokenizer's files, for `load_renderer`. The first call builds the tokenizer.

    Args:
        cache_folder: parent of the folder; by default `$XDG_CACHE_HOME/prorl-envs`. The folder's name
            contains a hash of the training text, the template, and the version of the tokenizers package.
    """
    root = cache_folder or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prorl-envs"
    recipe = (_CORPUS, CHAT_TEMPLATE, VOCAB_SIZE, _SPECIAL, _STRUCTURE, version("tokenizers"))
    folder = root / f"scripted-tokenizer-{blake2s(repr(recipe).encode(), digest_size=6).hexdigest()}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=root))
    save_tokenizer(partial)
    try:
        partial.rename(folder)  # atomic: other processes never see an incomplete folder
    except OSError:
        shutil.rmtree(partial)
        if not folder.is_dir():  # otherwise another process has created the same folder meanwhile
            raise
    return folder


def builtin_renderer() -> TemplateRenderer:
    """Create the renderer of the built-in tokenizer in memory."""
    tokenizer = Tokenizer.from_str(_trained())
    return TemplateRenderer(tokenizer, ChatTemplate(CHAT_TEMPLATE))


@cache
def _trained() -> str:
    return _train().to_str()


def _train(corpus: str = _CORPUS, whole: Sequence[str] = ()) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    words: pre_tokenizers.PreTokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if whole:
        undivided = "|".join(map(re.escape, whole))
        pattern = Regex(rf"{undivided}| ?\p{{L}}+| ?\p{{N}}| ?[^\s\p{{L}}\p{{N}}]|\s")
        words = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(pattern, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(_SPECIAL) - len(_STRUCTURE),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.splitlines(keepends=True), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in _STRUCTURE])
    return tokenizer
