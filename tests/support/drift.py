"""Random episodes that test a renderer: each prompt must start with all earlier tokens.

Observations are hostile; answers are canonical, tokenised in another way, cut off, or random tokens. The test
counts forbidden events. To validate itself, it also counts the drift of a client that tokenises again.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prorl_envs.errors import InputError
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.model.types import Sampled
from prorl_envs.rollout.agent.token_ledger import Ledger
from prorl_envs.tools.types import ToolSpec

TOOL = ToolSpec(
    "bash",
    "Run a command.",
    {"type": "object", "properties": {"command": {"type": "string"}, "count": {"type": "integer"}}},
)
_WORDS = (
    "ls -la",
    "naïve",
    "日本",
    "🙂",
    "\n",
    "  ",
    "{",
    '"',
    "\\",
    "</parameter>",
    "done.",
    "a" * 40,
    "é\u0301",
)


@dataclass(slots=True)
class DriftCounts:
    """Counters of the test.

    Args:
        episodes, turns, tokens: amount of tested data.
        rewritten: prompts that did not start with all ids before.
        unlike: histories of faithful answers whose text differs from the template's.
        smuggled: observations that added their own control tokens.
        misread: calls that were not parsed as intended.
        drift: positions at which the ledger saw a prompt differ.
        again: the same, for a client that tokenises the history again.
    """

    episodes: int = 0
    turns: int = 0
    tokens: int = 0
    rewritten: int = 0
    unlike: int = 0
    smuggled: int = 0
    misread: int = 0
    drift: int = 0
    again: int = 0

    @property
    def wrong(self) -> int:
        """Number of forbidden events."""
        return self.rewritten + self.unlike + self.smuggled + self.misread + self.drift


class DriftEpisodes:
    """Random episodes with one renderer.

    Args:
        renderer: the tested renderer.
        seed: seed of all random choices.
    """

    def __init__(self, renderer: TemplateRenderer, seed: int = 0) -> None:
        self.renderer = renderer
        self.counts = DriftCounts()
        self._chance = random.Random(seed)
        added = renderer.tokenizer.get_added_tokens_decoder()
        self._control = frozenset(added)
        self._literals = sorted(token.content for token in added.values())
        self._reasoning = {"reasoning_content": "thought"}
        try:
            renderer.assistant(self._text_answer("x"))
        except InputError:  # reasoning is turned off
            self._reasoning = {}
        #: True if the template keeps an answer unchanged after a user message, or a call after its results.
        self.keeps_answers = self._kept(self._text_answer("x"))
        self.keeps_calls = self._kept(self._call("x"))

    def play(self, turns: int = 4) -> None:
        """Run one episode of at most `turns` turns."""
        renderer, counts = self.renderer, self.counts
        messages: list[dict[str, Any]] = [{"role": "user", "content": self._text()}]
        ids = renderer.prompt(messages, [TOOL])
        ledger, faithful = Ledger(ids), True
        again = Ledger(ids)
        for _ in range(self._chance.randint(1, turns)):
            ledger.sent(ids)
            again.sent(self._tokenised_again(ids))
            message, answer, meant = self._answer()
            faithful = faithful and meant
            messages.append(message)
            new = self._observations(message)
            before = [*ids, *answer.ids]
            bridge = renderer.bridge(answer, new)
            harmless = renderer.bridge(answer, [{**m, "content": "x"} for m in new])
            for each in (ledger, again):
                each.sampled(answer, 0.0)
                each.observed(bridge)
            ids = [*before, *bridge]
            messages += new
            counts.turns += 1
            counts.rewritten += ids[: len(before)] != before
            counts.smuggled += self._controls(bridge) != self._controls(harmless)
            if faithful:
                counts.unlike += renderer.decode(ids) != renderer.decode(renderer.prompt(messages, [TOOL]))
        ledger.sent(ids)
        counts.episodes += 1
        counts.tokens += len(ids)
        counts.drift += ledger.trajectory().drift
        counts.again += again.trajectory().drift

    def _answer(self) -> tuple[dict[str, Any], Sampled, bool]:
        """Return a message, its ids as sampled, and whether they match the template's text."""
        kind = self._chance.random()
        if kind < 0.15:
            noise = [
                self._chance.randrange(self.renderer.vocab_size) for _ in range(self._chance.randint(0, 12))
            ]
            self.renderer.parse(noise, [TOOL])
            return {"role": "assistant", "content": "noise"}, _sampled(noise), False
        says = kind < 0.3
        message: dict[str, Any] = self._call(f"a{self._plain_text()}a")
        if says:
            message = self._text_answer(f"a{self._text()}a")
        ids = self.renderer.assistant(message)
        if kind > 0.6:
            ids = self._split(ids)
        if not says:
            read = [(call.name, call.arguments) for call in self.renderer.parse(ids, [TOOL]).tool_calls]
            self.counts.misread += read != [("bash", message["tool_calls"][0]["function"]["arguments"])]
        if kind > 0.9:
            return message, _sampled(ids[: self._chance.randrange(len(ids))]), False
        return message, _sampled(ids), self.keeps_answers if says else self.keeps_calls

    def _call(self, command: str) -> dict[str, Any]:
        function = {"name": "bash", "arguments": {"command": command, "count": self._chance.randint(0, 9)}}
        call = {"id": "abcdefgh1", "type": "function", "function": function}
        return {"role": "assistant", "content": "", **self._reasoning, "tool_calls": [call]}

    def _text_answer(self, text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text, **self._reasoning}

    def _observations(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        if not message.get("tool_calls"):
            return [{"role": "user", "content": self._text()}]
        return [{"role": "tool", "content": self._text(), "tool_call_id": "abcdefgh1", "name": "bash"}]

    def _text(self) -> str:
        """Return words, parts of control tokens, and complete control tokens."""
        chosen = []
        for _ in range(self._chance.randint(0, 8)):
            literal = self._chance.choice(self._literals)
            cut = self._chance.randrange(len(literal))
            chosen.append(
                self._chance.choice([self._chance.choice(_WORDS), literal, literal[cut:], literal[:cut]])
            )
        return "".join(chosen)

    def _plain_text(self) -> str:
        """Return the text of an argument: only words, because the model itself writes calls."""
        return "".join(self._chance.choices(_WORDS, k=self._chance.randint(0, 6)))

    def _split(self, ids: Sequence[int]) -> list[int]:
        """Return other tokens of the same text."""
        tokenizer, split = self.renderer.tokenizer, list[int]()
        for number in ids:
            text = self.renderer.decode([number])
            if number in self._control or len(text) < 2 or "\ufffd" in text or self._chance.random() < 0.5:
                split.append(number)
                continue
            cut = self._chance.randrange(1, len(text))
            for part in (text[:cut], text[cut:]):
                split += tokenizer.encode(part, add_special_tokens=False).ids
        return split

    def _kept(self, message: dict[str, Any]) -> bool:
        """Return whether the template writes an answer in the history with the text that was sampled."""
        call = self._call("x")
        before = [{"role": "user", "content": "x"}, call, *self._observations(call)]
        after = self._observations(message)
        answer = _sampled(self.renderer.assistant(message))
        ids = [*self.renderer.prompt(before), *answer.ids, *self.renderer.bridge(answer, after)]
        whole = self.renderer.prompt([*before, message, *after])
        return self.renderer.decode(ids) == self.renderer.decode(whole)

    def _tokenised_again(self, ids: Sequence[int]) -> list[int]:
        return self.renderer.tokenizer.encode(self.renderer.decode(ids), add_special_tokens=False).ids

    def _controls(self, ids: Sequence[int]) -> list[int]:
        return [number for number in ids if number in self._control]


def _sampled(ids: Sequence[int]) -> Sampled:
    return Sampled(tuple(ids), (-0.5,) * len(ids), "stop", "", "")
