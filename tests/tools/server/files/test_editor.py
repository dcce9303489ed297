"""The promises of the file editor, on real sandboxes."""

import re
from typing import Any

import pytest

from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.server.files.text import FILE_LIMIT
from prorl_envs.tools.types import ToolCall, ToolResult

pytestmark = pytest.mark.anyio
PATH = "/workspace/dir/file.txt"


async def edit(box: Toolbox, command: str, path: str = PATH, **arguments: Any) -> ToolResult:
    call = ToolCall("1", "str_replace_editor", {"command": command, "path": path, **arguments})
    return await box.call(call, timeout_s=10)


async def test_an_error_message_is_bounded_like_every_answer(box: Toolbox) -> None:
    result = await edit(box, "view", "/" + "a" * 1_000_000)
    assert not result.ok
    assert len(result.text) < 2 * box.limits.output_bytes
    assert result.truncated_bytes > 0


async def test_create_view_and_refusal_to_overwrite(box: Toolbox) -> None:
    assert (
        await edit(box, "create", file_text="one\ntwo\n")
    ).text == f"File created successfully at: {PATH}\n"
    result = await edit(box, "view")
    assert result.text == f"Here's the result of running `cat -n` on {PATH}:\n     1\tone\n     2\ttwo\n"
    again = await edit(box, "create", file_text="")
    assert not again.ok
    assert "already exists" in again.text


@pytest.mark.parametrize(
    ("view_range", "shown"),
    [([2, 3], "2 3"), ([2, -1], "2 3 4"), ([4, 4], "4"), ([3, 99], "3 4")],
)
async def test_a_range_of_lines_can_be_viewed(box: Toolbox, view_range: list[int], shown: str) -> None:
    await box.write(PATH, b"l1\nl2\nl3\nl4")
    result = await edit(box, "view", view_range=view_range)
    assert [line.split("\t")[1] for line in result.text.splitlines()[1:]] == [f"l{n}" for n in shown.split()]


@pytest.mark.parametrize("view_range", [[0, 2], [5, 6], [3, 2], [1], [1, 2, 3], [-1, 2]])
async def test_an_invalid_range_is_refused(box: Toolbox, view_range: list[int]) -> None:
    await box.write(PATH, b"l1\nl2\nl3\nl4")
    result = await edit(box, "view", view_range=view_range)
    assert not result.ok
    assert "view_range" in result.text


async def test_a_directory_is_listed_two_levels_deep(box: Toolbox) -> None:
    await box.run(["mkdir", "-p", "a/b/c", ".hidden", "z"], timeout_s=10)
    await box.run(["touch", "a/b/f", "a/b/c/deep", "m"], timeout_s=10)
    result = await edit(box, "view", "/workspace")
    assert result.text.splitlines()[1:] == [
        "/workspace",
        "/workspace/a/",
        "/workspace/a/b/",
        "/workspace/m",
        "/workspace/z/",
    ]


async def test_a_replacement_shows_its_surroundings(box: Toolbox) -> None:
    await box.write(PATH, "".join(f"line {n}\n" for n in range(1, 21)).encode())
    result = await edit(box, "str_replace", old_str="line 10\n", new_str="ten\nand a half\n")
    numbers = [line.split("\t")[0].strip() for line in result.text.splitlines() if "\t" in line]
    assert numbers == [str(n) for n in range(6, 17)]
    assert b"line 9\nten\nand a half\nline 11\n" in await box.read(PATH)


async def test_a_replacement_must_be_unique(box: Toolbox) -> None:
    await box.write(PATH, b"a\nb\na\n")
    result = await edit(box, "str_replace", old_str="a", new_str="c")
    assert not result.ok
    assert "on lines 1, 3" in result.text
    missing = await edit(box, "str_replace", old_str="z", new_str="c")
    assert "does not occur verbatim" in missing.text
    assert await box.read(PATH) == b"a\nb\na\n"


async def test_overlapping_matches_are_not_unique(box: Toolbox) -> None:
    await box.write(PATH, b"aXaXa\n")
    assert not (await edit(box, "str_replace", old_str="aXa", new_str="b")).ok


async def test_leaving_out_the_new_text_deletes_the_old(box: Toolbox) -> None:
    await box.write(PATH, b"keep drop keep\n")
    assert (await edit(box, "str_replace", old_str=" drop")).ok
    assert await box.read(PATH) == b"keep keep\n"


@pytest.mark.parametrize(
    ("before", "line", "after"),
    [
        (b"a\nb\n", 0, b"new\na\nb\n"),
        (b"a\nb\n", 1, b"a\nnew\nb\n"),
        (b"a\nb\n", 2, b"a\nb\nnew\n"),
        (b"a\nb", 2, b"a\nb\nnew"),
        (b"", 0, b"new\n"),
        (b"a\r\nb\r\n", 1, b"a\r\nnew\r\nb\r\n"),
    ],
)
async def test_insert_goes_after_the_line(box: Toolbox, before: bytes, line: int, after: bytes) -> None:
    await box.write(PATH, before)
    assert (await edit(box, "insert", insert_line=line, new_str="new")).ok
    assert await box.read(PATH) == after


async def test_insert_out_of_range_is_refused(box: Toolbox) -> None:
    await box.write(PATH, b"a\n")
    result = await edit(box, "insert", insert_line=2, new_str="x")
    assert "must be between 0 and 1" in result.text


async def test_undo_restores_every_version_step_by_step(box: Toolbox) -> None:
    await edit(box, "create", file_text="1\n")
    await edit(box, "str_replace", old_str="1", new_str="2")
    await edit(box, "insert", insert_line=1, new_str="3")
    assert (await edit(box, "undo_edit")).ok
    assert await box.read(PATH) == b"2\n"
    assert (await edit(box, "undo_edit")).ok
    assert await box.read(PATH) == b"1\n"
    assert "removed" in (await edit(box, "undo_edit")).text
    with pytest.raises(FileNotFoundError):
        await box.read(PATH)
    assert not (await edit(box, "undo_edit")).ok


async def test_modes_line_ends_links_and_odd_bytes_are_unchanged(box: Toolbox) -> None:
    await box.write(PATH, b"a\r\nb \xff\r\n", mode=0o755)
    await box.run(["ln", "-s", PATH, "link"], timeout_s=10)
    assert (await edit(box, "str_replace", "/workspace/link", old_str="a\nb", new_str="c\nd")).ok
    assert await box.read(PATH) == b"c\r\nd \xff\r\n"
    listing = await box.run(["stat", "-c", "%a %F", PATH, "link"], timeout_s=10)
    assert listing.output == b"755 regular file\n777 symbolic link\n"
    assert (await edit(box, "view")).text.endswith("     2\td ?\n")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("file.txt", "not absolute"),
        ("/workspace/none", "no such file"),
        ("/usr/bin/ls", "not a text file"),
        ("/dev/zero", "not a regular file"),
        ("/workspace/fifo", "not a regular file"),
        ("/workspace/big", "use the shell"),
        ("/a\0b", "NUL"),
    ],
)
async def test_unviewable_files_are_refused_with_a_reason(box: Toolbox, path: str, said: str) -> None:
    await box.run(["mkfifo", "fifo"], timeout_s=10)
    await box.run(["truncate", "-s", str(FILE_LIMIT + 1), "big"], timeout_s=10)
    result = await edit(box, "view", path)
    assert not result.ok
    assert said in result.text


async def test_the_system_cannot_be_edited(box: Toolbox) -> None:
    result = await edit(box, "create", "/usr/new", file_text="x")
    assert not result.ok
    assert "read-only" in result.text


@pytest.mark.parametrize(
    ("command", "said"),
    [("create", "file_text"), ("str_replace", "old_str"), ("insert", "insert_line")],
)
async def test_a_missing_argument_is_named(box: Toolbox, command: str, said: str) -> None:
    assert f"needs the argument `{said}`" in (await edit(box, command)).text


async def test_a_long_view_is_bounded(box: Toolbox) -> None:
    await box.write(PATH, b"x" * 1_000_000 + b"\nend\n")
    result = await edit(box, "view")
    assert len(result.text) < box.limits.output_bytes + 200
    assert result.truncated_bytes > 900_000
    assert result.text.endswith("     2\tend\n")


async def test_an_edit_under_one_name_is_undone_under_another(box: Toolbox) -> None:
    await box.write(PATH, b"a\n")
    await box.run(["ln", "-s", PATH, "link"], timeout_s=10)
    assert (await edit(box, "str_replace", "/workspace/link", old_str="a", new_str="b")).ok
    assert (await edit(box, "undo_edit")).ok
    assert await box.read(PATH) == b"a\n"


async def test_an_undo_that_fails_can_be_tried_again(box: Toolbox) -> None:
    await edit(box, "create", file_text="1\n")
    await edit(box, "str_replace", old_str="1", new_str="2")
    await box.run(["sh", "-c", "rm -r dir; touch dir"], timeout_s=10)
    assert not (await edit(box, "undo_edit")).ok
    await box.run(["rm", "dir"], timeout_s=10)
    assert (await edit(box, "undo_edit")).ok
    assert await box.read(PATH) == b"1\n"


@pytest.mark.parametrize("name", [PATH, "/workspace/link"])
async def test_an_undo_never_discards_a_newer_change(box: Toolbox, name: str) -> None:
    await box.run(["ln", "-s", PATH, "link"], timeout_s=10)
    await edit(box, "create", file_text="1\n")
    await edit(box, "str_replace", old_str="1", new_str="2")
    await box.run(["sh", "-c", f"echo shell >> {PATH}"], timeout_s=10)
    result = await edit(box, "undo_edit", name)
    assert not result.ok
    assert "discard the newer change. Nothing was undone." in result.text
    assert await box.read(PATH) == b"2\nshell\n"
    await box.write(PATH, b"2\n")  # as the edit left it
    assert (await edit(box, "undo_edit", name)).ok
    assert await box.read(PATH) == b"1\n"
    await box.run(["sh", "-c", f"echo shell >> {PATH}"], timeout_s=10)
    assert not (await edit(box, "undo_edit", name)).ok  # of the creation
    assert await box.read(PATH) == b"1\nshell\n"


async def test_an_undo_of_a_creation_removes_the_file_and_no_link_to_it(box: Toolbox) -> None:
    await edit(box, "create", file_text="1\n")
    await box.run(["ln", "-s", PATH, "link"], timeout_s=10)
    assert (await edit(box, "undo_edit", "/workspace/link")).ok
    assert (await box.run(["test", "-L", "link"], timeout_s=10)).exit_code == 0
    with pytest.raises(FileNotFoundError):
        await box.read(PATH)


async def test_a_file_that_is_gone_can_be_restored(box: Toolbox) -> None:
    await box.write(PATH, b"1\n")
    await edit(box, "str_replace", old_str="1", new_str="2")
    await box.run(["rm", PATH], timeout_s=10)
    assert (await edit(box, "undo_edit")).ok
    assert await box.read(PATH) == b"1\n"


@pytest.mark.parametrize(
    ("before", "old", "new", "after"),
    [
        (b"\xef\xbb\xbfa\nb\n", "a", "c", b"\xef\xbb\xbfc\nb\n"),
        (b"a\r\nb\r\n", "a", "c\nd", b"c\r\nd\r\nb\r\n"),  # one line becomes two
        (b"a\r\nb\r\nc", "a\nb", "x\ny", b"x\r\ny\r\nc"),
        (b"a\r\nb\nc\n", "b\nc", "x\ny", b"a\r\nx\ny\n"),  # mixed line ends: as written
        (b"a\nb", "b", "c", b"a\nc"),
        (b"a\rb\x0cc\n", "b", "d", b"a\rd\x0cc\n"),
        (b"caf\xe9 x\n", "x", "y", b"caf\xe9 y\n"),
        ("é a\n".encode(), "a", "ü", "é ü\n".encode()),
        (b"x" * 3_000_000 + b"a\n", "a", "b", b"x" * 3_000_000 + b"b\n"),
    ],
)
async def test_text_outside_an_edit_is_unchanged(
    box: Toolbox, before: bytes, old: str, new: str, after: bytes
) -> None:
    await box.write(PATH, before)
    result = await edit(box, "str_replace", old_str=old, new_str=new)
    assert result.ok, result.text
    assert await box.read(PATH) == after
    assert (await edit(box, "undo_edit")).ok
    assert await box.read(PATH) == before


async def test_a_byte_order_mark_stays_first_and_is_not_shown(box: Toolbox) -> None:
    await box.write(PATH, b"\xef\xbb\xbfa\n")
    assert (await edit(box, "view")).text.endswith("     1\ta\n")
    assert (await edit(box, "insert", insert_line=0, new_str="first")).ok
    assert await box.read(PATH) == b"\xef\xbb\xbffirst\na\n"


async def test_encodings_are_never_mixed(box: Toolbox) -> None:
    await box.write(PATH, b"caf\xe9\n")
    for arguments in ({"old_str": "caf", "new_str": "th\u00e9"}, {"insert_line": 1, "new_str": "\u00e9"}):
        result = await edit(box, "str_replace" if "old_str" in arguments else "insert", **arguments)
        assert not result.ok
        assert "only ASCII text" in result.text
    await box.write(PATH, "text \u4e2d".encode("utf-16"))
    for command in ("view", "str_replace"):
        result = await edit(box, command, **({"old_str": "t", "new_str": "u"} if command != "view" else {}))
        assert "is UTF-16" in result.text
    assert await box.read(PATH) == "text \u4e2d".encode("utf-16")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/proc/version", "exists|read-only|operation not permitted|permission denied|no such file"),
        ("/proc/new", "no such file|operation not permitted|permission denied"),
        ("/dev/null", "exists|not a regular file"),
        ("/workspace/fifo", "exists|not a regular file"),
        ("/workspace/loop", "exists|symbolic links"),
        ("/workspace/locked/file", "permission denied"),
        ("/workspace/file/below", "not a directory"),
        ("/workspace/" + "n" * 256, "too long"),
        ("~/file", "not absolute"),
    ],
)
async def test_unwritable_text_is_refused_with_a_reason(box: Toolbox, path: str, said: str) -> None:
    script = "mkfifo fifo; ln -s loop loop; touch file; mkdir -m 555 locked; "
    await box.run(["sh", "-c", script], timeout_s=10)
    for arguments in ({"file_text": "x"}, {"old_str": "Linux", "new_str": "x"}):
        command = "create" if "file_text" in arguments else "str_replace"
        if path == "/workspace/locked/file" and (await box.run(["touch", path], timeout_s=10)).exit_code == 0:
            return  # this user may write anywhere
        result = await edit(box, command, path, **arguments)
        assert not result.ok
        assert re.search(f"{said}|no such file|does not occur", result.text), result.text
    assert ".tmp" not in (await box.run(["ls", "-AR"], timeout_s=10)).output.decode()


async def test_a_directory_of_a_hundred_thousand_files_is_listed_in_part(box: Toolbox) -> None:
    make = "seq -f 'file%06g' 100000 | xargs touch; mkdir -p .h; cd .h; seq 20000 | xargs touch"
    await box.run(["sh", "-c", make], timeout_s=60)
    result = await edit(box, "view", "/workspace")
    assert result.ok
    assert result.text.endswith("[... more than 1000 entries; the rest is left out ...]\n")
    assert len(result.text) < 2 * box.limits.output_bytes


async def test_names_and_lines_that_are_not_unicode_are_shown(box: Toolbox) -> None:
    await box.run(["bash", "-c", r"touch $'bad\xff'; printf 'a\xffb\n' > f"], timeout_s=10)
    assert "/workspace/bad?" in (await edit(box, "view", "/workspace")).text
    assert "a?b" in (await edit(box, "view", "/workspace/f")).text
