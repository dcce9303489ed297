"""The text of single tokens."""

from prorl_envs.policy.token_texts import token_texts
from prorl_envs.testing.tokenizer import builtin_renderer


def test_the_texts_of_tokens_are_the_text() -> None:
    renderer = builtin_renderer()
    for text in ("say hello, world\n\tif x:", "häuser 北京 🙂 \u202e", "<|im_end|>"):
        ids = renderer.tokenizer.encode(text, add_special_tokens=False).ids
        texts = token_texts(renderer.decode, ids)
        assert len(texts) == len(ids) and "".join(texts) == text


def test_half_a_character_and_ids_that_are_none_have_a_text_too() -> None:
    renderer = builtin_renderer()
    ids = renderer.tokenizer.encode("🙂", add_special_tokens=False).ids
    assert len(token_texts(renderer.decode, [*ids[:-1], 10**9, -1])) == len(ids) + 1


def test_a_space_in_front_stays() -> None:
    """Decoders of SentencePiece's kind drop the first space of a text, whatever token it is of."""
    words = {1: " the", 2: " cat", 3: "s"}
    assert token_texts(lambda ids: "".join(words[i] for i in ids).removeprefix(" "), [1, 2, 3, 2]) == [
        " the", " cat", "s", " cat",
    ]  # fmt: skip
