"""The promises of `apply_patch`, on real sandboxes."""

import pytest

from prorl_envs.tools.client.toolbox import Toolbox
from prorl_envs.tools.server.files.text import FILE_LIMIT
from prorl_envs.tools.types import ToolCall, ToolResult

pytestmark = pytest.mark.anyio
T = 60.0


async def patch(box: Toolbox, *lines: str) -> ToolResult:
    text = "\n".join(["*** Begin Patch", *lines, "*** End Patch"])
    return await box.call(ToolCall("1", "apply_patch", {"input": text}), timeout_s=T)


async def undo(box: Toolbox, path: str) -> ToolResult:
    call = ToolCall("1", "str_replace_editor", {"command": "undo_edit", "path": path})
    return await box.call(call, timeout_s=T)


async def listing(box: Toolbox) -> str:
    """Return every file's mode, path and content."""
    script = (
        'find . -type f | sort | while read f; do stat -c "%a %n" $f; cat $f; done; find . -type d | sort'
    )
    return (await box.run(["sh", "-c", script], timeout_s=T)).output.decode()


async def test_files_are_created_changed_moved_and_removed_together(box: Toolbox) -> None:
    await box.write("/workspace/x.py", b"a\nb\n", mode=0o755)
    await box.write("/workspace/old", b"1\n")
    await box.write("/workspace/gone", b"2\n")
    result = await patch(
        box,
        "*** Add File: new/dir/file",
        "+hello",
        "*** Update File: x.py",
        "@@",
        " a",
        "-b",
        "+c",
        "*** Update File: old",
        "*** Move to: /workspace/moved",
        "@@",
        "-1",
        "+one",
        "*** Delete File: gone",
    )
    assert result.ok, result.text
    assert result.text == (
        "Success. Updated the following files:\nA new/dir/file\nM x.py\nM /workspace/moved\nD gone\n"
    )
    assert await listing(box) == (
        "644 ./moved\none\n644 ./new/dir/file\nhello\n755 ./x.py\na\nc\n.\n./new\n./new/dir\n"
    )


async def test_undo_restores_each_file_with_its_mode(box: Toolbox) -> None:
    await box.write("/workspace/x", b"a\n", mode=0o750)
    await box.write("/workspace/gone", b"2\n", mode=0o640)
    before = await listing(box)
    lines = ["*** Update File: x", "@@", "-a", "+b", "*** Delete File: ./gone", "*** Add File: new", "+n"]
    assert (await patch(box, *lines)).ok
    for name in ("x", "gone", "new"):
        result = await undo(box, f"/workspace/{name}")
        assert result.ok, result.text
    assert await listing(box) == before


async def test_a_file_that_was_made_again_after_its_deletion_is_kept(box: Toolbox) -> None:
    await box.write("/workspace/x", b"a\n")
    assert (await patch(box, "*** Delete File: x")).ok
    await box.write("/workspace/x", b"new\n")
    result = await undo(box, "/workspace/x")
    assert "discard the newer change" in result.text
    assert await box.read("/workspace/x") == b"new\n"


async def test_a_unified_diff_is_accepted(box: Toolbox) -> None:
    await box.write("/workspace/x", b"a\nb\n")
    diff = "--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"
    result = await box.call(ToolCall("1", "apply_patch", {"input": diff}), timeout_s=T)
    assert result.ok, result.text
    assert await box.read("/workspace/x") == b"a\nc\n"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["*** Update File: x", "@@", "-nowhere", "+b"], "x: hunk 1 of 1 does not apply"),
        (["*** Update File: none", "@@", "-a", "+b"], "none: no such file."),
        (["*** Delete File: none"], "none: no such file."),
        (["*** Delete File: dir"], "dir: is a directory."),
        (["*** Add File: x", "+b"], "there is a file already"),
        (["*** Update File: x", "*** Move to: dir/y"], "there is a file already"),
        (["*** Delete File: link"], "it is a link"),
        (["*** Update File: binary", "@@", "+b"], "not a text file"),
        (["*** Update File: big", "@@", "+b"], "use the shell"),
        (["*** Update File: fifo", "@@", "+b"], "not a regular file"),
        (["*** Add File: ../tmp/y", "+b"], "holds `..`"),
        (["*** Add File: /usr/y", "+b"], "read-only file system"),
        (["*** Add File: /proc/y", "+b"], "/proc/y:"),
        (["*** Add File: x/y", "+b"], "not a directory"),
        (["*** Delete File: x", "*** Update File: x", "@@", "+b"], "removed it already"),
    ],
)
async def test_one_impossible_change_leaves_all_files_unchanged(
    box: Toolbox, lines: list[str], said: str
) -> None:
    script = (
        "printf 'a\\n' > x; mkdir dir; echo y > dir/y; ln -s x link; mkfifo fifo; printf '\\0' > binary;"
        f"truncate -s {FILE_LIMIT + 1} big"
    )
    await box.run(["sh", "-c", script], timeout_s=T)
    before = await state(box)
    good = ["*** Add File: fresh/dir/file", "+x", "*** Update File: dir/y", "@@", "-y", "+z"]
    result = await patch(box, *good, *lines)
    assert not result.ok
    assert said in result.text
    assert result.text.endswith("No file was changed.")
    assert await state(box) == before


async def state(box: Toolbox) -> bytes:
    """Return the whole workspace except times, sizes of folders, and inode numbers."""
    script = r"find . -printf '%p %M %y %l\n' | sort; find . -type f | sort | xargs sha1sum"
    return (await box.run(["sh", "-c", script], timeout_s=T)).output


async def test_later_changes_see_earlier_ones_and_links_lead_to_one_file(box: Toolbox) -> None:
    await box.write("/workspace/x", b"a\nb\n")
    await box.run(["ln", "-s", "x", "link"], timeout_s=T)
    lines = ["*** Update File: x", "@@", "-a", "+1", "*** Update File: link", "@@", "-b", "+2"]
    assert (await patch(box, *lines)).ok
    assert await box.read("/workspace/x") == b"1\n2\n"
    assert (await box.run(["readlink", "link"], timeout_s=T)).output == b"x\n"


async def test_line_endings_marks_and_odd_bytes_are_unchanged(box: Toolbox) -> None:
    await box.write("/workspace/x", b"\xef\xbb\xbfa\r\nb\xff\r\nc")
    assert (await patch(box, "*** Update File: x", "@@", "-a", "+1", "+2")).ok
    assert await box.read("/workspace/x") == b"\xef\xbb\xbf1\r\n2\r\nb\xff\r\nc"


async def test_wrong_arguments_are_reported(box: Toolbox) -> None:
    result = await box.call(ToolCall("1", "apply_patch", {"patch": "x"}), timeout_s=T)
    assert result.text == "apply_patch: unknown argument 'patch'; it takes: input"
