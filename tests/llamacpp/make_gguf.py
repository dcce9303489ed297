"""Make a tiny model for llama.cpp: `make_gguf.py TOKENIZER_JSON END_ID FILE`, with a Python that has `gguf`.

The model is a Qwen 3 with two layers, random weights, and the given tokenizer. It samples only ASCII tokens,
because some versions of llama.cpp lose answers that are not UTF-8.
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy

_HIDDEN, _HEADS, _HEAD, _LAYERS, _INNER, _CONTEXT = 64, 2, 32, 2, 128, 4096


def main(tokenizer: Path, end: int, out: Path) -> None:
    model = json.loads(tokenizer.read_text())
    writer = gguf.GGUFWriter(out, "qwen3")
    writer.add_name("tiny")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_HIDDEN)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_HEADS)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    _weights(writer, numpy.array([_plain(token) for token in _vocabulary(writer, model, end)]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _vocabulary(writer: gguf.GGUFWriter, model: dict[str, Any], end: int) -> list[str]:
    """Write the tokenizer; return its tokens, by id."""
    added = {token["content"]: token["special"] for token in model["added_tokens"]}
    tokens = sorted(
        {**model["model"]["vocab"], **{t["content"]: t["id"] for t in model["added_tokens"]}}.items(),
        key=lambda item: item[1],
    )
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.USER_DEFINED, None: gguf.TokenType.NORMAL}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_types([kinds[added.get(text)] for text, _ in tokens])
    merges = model["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)
    return [text for text, _ in tokens]


def _plain(token: str) -> bool:
    """Whether a token of a byte-level vocabulary is ASCII; spaces and line ends are encoded as letters."""
    return token.replace("\u0120", "").replace("\u010a", "").isascii()


def _weights(writer: gguf.GGUFWriter, said: Any) -> None:
    """Write weights.

    Args:
        said: whether the model may sample each token, shape [V].
    """
    chance, count = numpy.random.default_rng(0), len(said)

    def drawn(name: str, *shape: int, scale: float) -> None:
        writer.add_tensor(name, (chance.standard_normal(shape) * scale).astype(numpy.float32))

    def ones(name: str, size: int) -> None:
        writer.add_tensor(name, numpy.ones(size, dtype=numpy.float32))

    wide = _HEADS * _HEAD
    # The first dimension is constant, as a replacement for a bias of the last layer.
    embedding = chance.standard_normal((count, _HIDDEN)).astype(numpy.float32)
    embedding[:, 0] = 8.0
    last = (chance.standard_normal((count, _HIDDEN)) * 0.5).astype(numpy.float32)
    last[:, 0] = numpy.where(said, 0.0, -20.0)
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output.weight", last)
    ones("output_norm.weight", _HIDDEN)
    for layer in range(_LAYERS):
        at = f"blk.{layer}."
        ones(f"{at}attn_norm.weight", _HIDDEN)
        ones(f"{at}ffn_norm.weight", _HIDDEN)
        ones(f"{at}attn_q_norm.weight", _HEAD)
        ones(f"{at}attn_k_norm.weight", _HEAD)
        for name in ("attn_q", "attn_k", "attn_v"):
            drawn(f"{at}{name}.weight", wide, _HIDDEN, scale=0.1)
        drawn(f"{at}attn_output.weight", _HIDDEN, wide, scale=0.1)
        drawn(f"{at}ffn_gate.weight", _INNER, _HIDDEN, scale=0.1)
        drawn(f"{at}ffn_up.weight", _INNER, _HIDDEN, scale=0.1)
        drawn(f"{at}ffn_down.weight", _HIDDEN, _INNER, scale=0.1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
