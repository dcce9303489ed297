"""Deliberate drift: rollouts of a client that stores text and tokenises it again for the trainer.

A model that imitated answers in another tokenisation than the tokenizer's samples such: its rollouts drift.
"""

import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, groupby, zip_longest
from typing import Any

from tokenizers import Tokenizer


def retokenised(
    output: dict[str, list[Any]], tokenizer: Tokenizer
) -> tuple[dict[str, list[Any]], dict[str, float]]:
    """Tokenise rollouts again.

    Args:
        output: output of a `rollout_func` of TRL.
        tokenizer: the model's tokenizer.

    Returns:
        the rollouts with the ids of their text. The start of an id's text decides whether it was
        sampled. Such ids have no log-probabilities, so these are 0. Also `drift`, the share of sampled ids
        that differ now or have moved; and `drifted`, the share of rollouts that have any.
    """
    ids, masks, changed, drifted, total = [], [], 0, 0, 0
    prompts = []
    for prompt, completion, mask in zip(
        output["prompt_ids"], output["completion_ids"], output["env_mask"], strict=True
    ):
        first, rest, sampled = _again(prompt, completion, mask, tokenizer)
        before = [number for number, bit in zip(completion, mask, strict=True) if bit]
        after = [number for number, bit in zip(rest, sampled, strict=True) if bit]
        others = sum(old != new for old, new in zip_longest(before, after))
        changed, drifted, total = changed + others, drifted + bool(others), total + len(before)
        prompts.append(first)
        ids.append(rest)
        masks.append(sampled)
    new = {"prompt_ids": prompts, "completion_ids": ids, "env_mask": masks}
    logprobs = [[0.0] * len(completion) for completion in ids]
    counts = {"drift": changed / max(total, 1), "drifted": drifted / max(len(ids), 1)}
    return {**output, **new, "logprobs": logprobs}, counts


def split(ids: Sequence[int], tokenizer: Tokenizer, share: float, chance: random.Random) -> list[int]:
    """Tokenise the same text differently: some tokens as two shorter ones.

    Args:
        ids: the text's ids.
        tokenizer: the model's tokenizer.
        share: share of the tokens that are split; a token is kept if its parts are no tokens.
        chance: source of random tokens and positions.
    """
    whole = tokenizer.get_added_tokens_decoder()
    written: list[int] = []
    for number in ids:
        parts: list[int | None] = [number]
        text = tokenizer.id_to_token(number) or ""
        if number not in whole and len(text) > 1 and chance.random() < share:
            place = chance.randrange(1, len(text))
            parts = [tokenizer.token_to_id(text[:place]), tokenizer.token_to_id(text[place:])]
        written += [number] if None in parts else [part for part in parts if part is not None]
    return written


def _again(
    prompt: Sequence[int], completion: Sequence[int], mask: Sequence[int], tokenizer: Tokenizer
) -> tuple[list[int], list[int], list[int]]:
    """Return prompt, completion and mask of the same text. The first sampled text starts the completion."""
    pieces = [(0, list(prompt))]
    pieces += [
        (bit, [number for _, number in run])
        for bit, run in groupby(zip(mask, completion, strict=True), key=lambda pair: pair[0])
    ]
    texts = [tokenizer.decode(piece, skip_special_tokens=False) for _, piece in pieces]
    starts = list(accumulate(map(len, texts), initial=0))[:-1]
    read = tokenizer.encode("".join(texts), add_special_tokens=False)
    owners = [bisect_right(starts, start) - 1 for start, _ in read.offsets]
    cut = next((at for at, owner in enumerate(owners) if owner > 0), len(owners) - 1)
    return read.ids[:cut], read.ids[cut:], [pieces[owner][0] for owner in owners[cut:]]
