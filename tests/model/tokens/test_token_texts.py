"""The text of single tokens."""

from prorl_envs.model.tokens.token_texts import token_texts
from prorl_envs.testing.tokenizer import builtin_renderer


def test_the_texts_of_tokens_join_to_the_text() -> None:
    renderer = builtin_renderer()
    for text in ("say hello, world\n\tif x:", "häuser 北京 🙂 \u202e", "<|im_end|>"):
        ids = renderer.tokenizer.encode(text, add_special_tokens=False).ids
        texts = token_texts(renderer.decode, ids)
        assert len(texts) == len(ids) and "".join(texts) == text


def test_partial_characters_and_invalid_ids_have_a_text_too() -> None:
    renderer = builtin_renderer()
    ids = renderer.tokenizer.encode("🙂", add_special_tokens=False).ids
    assert len(token_texts(renderer.decode, [*ids[:-1], 10**9, -1])) == len(ids) + 1


def test_a_leading_space_is_kept() -> None:
    """Decoders like SentencePiece's drop the first space of a text, whichever token it belongs to."""
    words = {1: " the", 2: " cat", 3: "s"}
    assert token_texts(lambda ids: "".join(words[i] for i in ids).removeprefix(" "), [1, 2, 3, 2]) == [
        " the", " cat", "s", " cat",
    ]  # fmt: skip
