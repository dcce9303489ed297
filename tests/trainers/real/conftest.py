"""Fixtures for tests with real trainers. `make test-trainers` runs each file in its trainer's environment."""

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl_envs.testing.tokenizer import VOCAB_SIZE, save_tokenizer

# Otherwise there is no trainer to import.
collect_ignore_glob = [] if "TEST_TRAINER" in os.environ else ["test_*.py"]


PAGES = Path(__file__).parents[3] / "docs" / "trainers"


def command_of(page: str, program: str) -> list[str]:
    """Return the words of the only command of `program` on a page, from the program on."""
    text = re.sub(r"\\\n\s*", "", (PAGES / page).read_text())
    [line] = [line for line in text.splitlines() if re.match(rf"(\S+ )*{re.escape(program)}( |$)", line)]
    words = shlex.split(line)
    return words[words.index(program) :]


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Do not check leaks, because trainers leak resources themselves."""
    yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Qwen 3 of 250,000 parameters, and the tokenizer of the tests."""
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
