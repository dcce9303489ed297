"""Variables of an image, parsed from the script that Apptainer writes for them; only plain text counts."""

import os
from pathlib import Path

import pytest

from prorl_envs.errors import SandboxError
from prorl_envs.sandbox.filesystem.image_env import parse_image_env, read_image_env

#: Lines that Apptainer 1.4 made from the values beside them.
LINES = [
    ('export PATH="/opt/conda/bin:/usr/bin"', "PATH", "/opt/conda/bin:/usr/bin"),
    ('export A="${A:-"two words"}"', "A", "two words"),
    (r'''export A="${A:-"a\\\"b'c"}"''', "A", "a\"b'c"),
    (r'export A="${A:-"\\$HOME \\`id\\` \\$(id)"}"', "A", "$HOME `id` $(id)"),
    (r'export A="${A:-"a\\\\b\\\\\\\\c"}"', "A", r"a\b\\c"),
    (r'export A="${A:-"one\ntwo\t\x01\u2028"}"', "A", "one\ntwo\t\x01\u2028"),
    ('export A="${A:-"ümlaut"}"', "A", "ümlaut"),
    ('export A="${A:-""}"', "A", ""),
    ('export A="${A:-}"', "A", ""),
]


@pytest.mark.parametrize(("line", "name", "value"), LINES)
def test_a_line_yields_the_original_value(line: str, name: str, value: str) -> None:
    assert parse_image_env(f"#!/bin/sh\n{line}\n") == {name: value}


@pytest.mark.parametrize(
    "line",
    [
        'export PATH="/opt/bin:$PATH"',
        'export A="$(touch /tmp/x)"',
        'export A="`id`"',
        'export A="x"; id',
        'export A="a" B="b"',
        'export A="${B:-"x"}"',
        'export A="${A:-${B}}"',
        r'export A="\q"',
        r'export A="\x00"',
        r'export A="\xff"',
        r'export A="\ud800"',
        r'export A="\UFFFFFFFF"',
        r'export A="\Uffffffff"',
        'export A="\udcff"',
        'export A="end\\"',
        "A=b",
        'export 1A="b"',
        '  export A="b"',
    ],
)
def test_values_that_need_a_shell_are_skipped(line: str) -> None:
    assert parse_image_env(f'{line}\nexport SEEN="yes"\n') == {"SEEN": "yes"}


def write(root: Path, name: str, text: str) -> Path:
    path = root / ".singularity.d/env" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_only_the_script_of_the_images_definition_is_read(tmp_path: Path) -> None:
    assert read_image_env(tmp_path) == {}
    write(tmp_path, "10-docker2singularity.sh", 'export A="1"\n')
    write(tmp_path, "90-environment.sh", 'export B="1"\n')
    assert read_image_env(tmp_path) == {"A": "1"}


def test_links_to_the_outside_are_not_followed(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", "10-docker.sh", 'export A="outside"\n')
    root = tmp_path / "root"
    root.mkdir()
    (root / ".singularity.d").symlink_to(tmp_path / "outside/.singularity.d")
    assert read_image_env(root) == {}
    (root / ".singularity.d").unlink()
    write(root, "other", "").with_name("10-docker.sh").symlink_to(outside)
    with pytest.raises(SandboxError, match="environment"):
        read_image_env(root)


def test_a_missing_or_oversized_script_is_no_error(tmp_path: Path) -> None:
    path = write(tmp_path, "10-docker.sh", "")
    path.unlink()
    os.mkfifo(path)
    assert read_image_env(tmp_path) == {}
    path.unlink()
    path.write_text("#" * 300_000)
    with pytest.raises(SandboxError, match="bytes"):
        read_image_env(tmp_path)
