"""The built-in tokenizer: it restores any text, and its ids are the same on every machine."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from prorl_envs.testing.tokenizer import VOCAB_SIZE, builtin_renderer, save_tokenizer, tokenizer_folder

TOKENIZER = builtin_renderer().tokenizer


@given(st.text())
def test_any_text_is_restored(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_text_is_compressed() -> None:
    text = '{"name": "bash", "arguments": {"command": "ls -la"}}'
    assert len(TOKENIZER.encode(text).ids) < len(text) / 2
    assert TOKENIZER.get_vocab_size() <= VOCAB_SIZE


def test_the_tokenizer_is_the_same_each_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_tokenizer(tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert Tokenizer.from_file(str(tmp_path / "one/tokenizer.json")).to_str() == TOKENIZER.to_str()


def test_the_folder_is_built_once(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"touched": True}))
    assert tokenizer_folder(tmp_path) == folder
    assert "touched" in config.read_text()
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_the_cache_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tokenizer_folder().parent == tmp_path / "prorl-envs"
