"""What the trainers' own tests share. Each file runs in its trainer's environment: make test-trainers."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_envs.testing.tokenizer import VOCAB_SIZE, save_tokenizer

# Else there is no trainer to import.
collect_ignore_glob = [] if "TEST_TRAINER" in os.environ else ["test_*.py"]


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """What a trainer leaves behind is its own."""
    yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Qwen 3 of a quarter of a million parameters, with the tokenizer of the tests."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder
