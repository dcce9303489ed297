"""Text encoded piece by piece has the same ids as the whole."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from prorl_envs.model.tokens.cached_encoder import LONG, CachedEncoder
from prorl_envs.testing.tokenizer import builtin_renderer

START, END = "<|im_start|>", "<|im_end|>"


def builtin() -> Tokenizer:
    return Tokenizer.from_str(builtin_renderer().tokenizer.to_str())


def with_token(text: str, **flags: bool) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        tokenizer = builtin()
        tokenizer.add_tokens([AddedToken(text, **{"normalized": False, **flags})])
        return tokenizer

    return make


def spaced(scheme: str) -> Callable[[], Tokenizer]:
    """Make a tokenizer that writes spaces as a mark, and puts it before the first piece, or before each."""

    def make() -> Tokenizer:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
        trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
        tokenizer.train_from_iterator(["some text and more text of a tool\n", "word by word <|>_"], trainer)
        tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in (START, END)])
        return tokenizer

    return make


def stripping() -> Tokenizer:
    """Return a tokenizer whose normalizer depends on the ends of the text."""
    tokenizer = builtin()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.NFC()])
    return tokenizer


def looking_back() -> Tokenizer:
    """Return a tokenizer whose words depend on the text before them."""
    tokenizer = builtin()
    words = pre_tokenizers.Split(Regex(r"(?<=\\n)\\w+|\\s+|\\w|[^\\s\\w]+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


#: Each with the control tokens at which it must not be cut.
TOKENIZERS: dict[str, tuple[Callable[[], Tokenizer], set[str]]] = {
    "built-in": (builtin, set()),
    "a longer token": (with_token(f"{END}\n"), {END}),
    "a token that ends as one begins": (with_token("x<|im_"), {START, END}),
    "a token inside": (with_token("im_end"), set()),
    "a token behind": (with_token("|>\n"), set()),
    "takes space from behind": (with_token("<|end|>", rstrip=True), {"<|end|>"}),
    "takes space from before": (with_token("<|end|>", lstrip=True), {"<|end|>"}),
    "a word only": (with_token("<|end|>", single_word=True), {"<|end|>"}),
    "looked for later": (with_token("<|end|>", normalized=True), {"<|end|>"}),
    "a space before the first": (spaced("first"), {START, END}),
    "a space before each": (spaced("always"), set()),
    "a normalizer that strips": (stripping, set()),
    "words that look back": (looking_back, set()),
}
MADE = {name: make() for name, (make, _) in TOKENIZERS.items()}
LITERALS = (START, END, "<|endoftext|>", "<|end|>", "<tool_call>", "<think>")
PARTS = st.sampled_from(
    [*LITERALS, "x<|im_", "<|im_", "end|>", "|>", ">", "<", "\n", " ", "assistant\n", "word"]
)
TEXTS = st.lists(PARTS | st.text(max_size=6), max_size=12).map("".join)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
def test_the_pieces_have_the_ids_of_the_whole(name: str, text: str) -> None:
    tokenizer = MADE[name]
    pieces = CachedEncoder(tokenizer, LITERALS)
    for _ in range(2):  # the second time from the cache
        assert pieces.encode(text) == tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", TOKENIZERS)
def test_text_is_cut_only_at_safe_control_tokens(name: str) -> None:
    at, never = set(CachedEncoder(MADE[name], LITERALS).at), TOKENIZERS[name][1]
    assert not at & never
    assert at or never >= {START, END}


def test_a_long_piece_has_the_ids_of_the_whole() -> None:
    text = f"{START}tool\n{'some words ' * LONG}{END}\n"
    assert CachedEncoder(MADE["built-in"], LITERALS).encode(text) == MADE["built-in"].encode(text).ids


def test_text_is_not_cut_at_unknown_tokens() -> None:
    assert CachedEncoder(builtin(), ["no token", START]).at == [START]
