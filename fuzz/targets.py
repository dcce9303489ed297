"""One small function per parser: it accepts any bytes. An exception is a finding.

Each has generated seeds: well-formed input from which the fuzzer starts.
"""

import contextlib
import io
import json
import os
import socket
import struct
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from prorl_envs.errors import SandboxError, TransferRefused
from prorl_envs.sandbox.filesystem.sif import labels, system_partition
from prorl_envs.tools.client.jupyter_output import CellOutput
from prorl_envs.tools.protocol.messages import (
    Bash,
    BashDone,
    CellDone,
    Content,
    Edit,
    Framer,
    Python,
    PythonDone,
    ToolRefused,
    WireError,
    decode_cell,
    decode_cell_done,
    decode_reply,
    decode_request,
    encode,
)
from prorl_envs.tools.protocol.shell_status import Reports
from prorl_envs.tools.protocol.terminal import (
    Exited,
    Input,
    Open,
    Output,
    SendSignal,
    decode_from_session,
    decode_to_session,
)
from prorl_envs.tools.protocol.transfer import (
    Chunk,
    Failed,
    Message,
    Pack,
    TransferChannel,
    ended,
)
from prorl_envs.tools.protocol.tree import Transferred, TreeLimits, pack
from prorl_envs.tools.protocol.unpack import unpack
from prorl_envs.tools.server.files.patch import Update, parse
from prorl_envs.tools.server.files.patch_match import patched
from prorl_envs.tools.server.files.text import EditError, decode
from prorl_envs.tools.server.input_detection import (
    ForegroundProcess,
    judge,
    parse_call,
    polled,
    selected,
    watched,
)

NONCE = "00112233445566ff"
_LIMITS = TreeLimits(bytes=1 << 16, entries=40, depth=8)
#: Maximum number of input bytes that a target reads.
_SIZE = 1 << 15


@dataclass(frozen=True, slots=True)
class Target:
    """A parser under test.

    Args:
        run: takes any bytes.
        seeds: well-formed input.
    """

    run: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]


def _cut(data: bytes) -> Iterator[bytes]:
    """Yield the input in pieces; the first byte sets their size."""
    size = data[0] + 1 if data else 1
    for start in range(1, len(data), size):
        yield data[start : start + size]


def frames(data: bytes) -> None:
    """Parse the frames between the host, a tool server and a Python session: `wire`."""
    whole, pieces = Framer(4096), Framer(4096)
    found: list[bytes] = []
    with contextlib.suppress(WireError):
        for piece in _cut(data):
            found += pieces.feed(piece)
    with contextlib.suppress(WireError):
        assert whole.feed(data[1:]) == found, "frames depend on how the stream is cut"
    decoders = (decode_request, decode_reply, decode_cell, decode_cell_done)
    for frame in (*found, data):
        for decoder in decoders:
            with contextlib.suppress(WireError):
                sent = encode(decoder(frame))  # every decoded value can be encoded
                assert encode(decoder(bytes(sent[4:]))) == sent


def _frame_seeds() -> Iterator[bytes]:
    messages: list[msgspec.Struct] = [
        Bash(1, "main", "echo hello", 10.0),
        Edit(2, "view", "/a", view_range=[1, -1]),
        Python(6, "1", 10.0),
        CellDone(3, "", [{"text/html": "<b>"}]),
        BashDone(1, "hello\n", 0, 0, "/workspace", False, ""),
        PythonDone(3, "1\n", 0, "NameError", False, "", [{"image/png": "x"}]),
        Content(4, b"bytes"),
        ToolRefused(5, 2, "No such file"),
    ]
    for message in messages:
        yield b"\x0f" + encode(message)
        yield bytes(encode(message)[4:])
    yield b"\x03" + b"".join(encode(message) for message in messages)


def terminal(data: bytes) -> None:
    """Parse the frames of an interactive session: `terminal_wire`."""
    for decoder in (decode_to_session, decode_from_session):
        with contextlib.suppress(WireError):
            message = decoder(data)
            assert decoder(bytes(encode(message)[4:])) == message


def _terminal_seeds() -> Iterator[bytes]:
    started = Open(["sh", "-i"], "/workspace", {"A": "b"}, True, 24, 80)
    for message in (started, Input(b"ls\n"), SendSignal("SIGINT"), Output(b"x", False), Exited(0, "")):
        yield bytes(encode(message)[4:])


@contextlib.contextmanager
def _channel(data: bytes) -> Iterator[TransferChannel]:
    """Run the host's end of a transfer whose other end sends this input."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        yield TransferChannel(ours)


def transfer(data: bytes) -> None:
    """Use the input as a tool server's messages in an upload and in a download: `tree_wire`, `unpack`."""
    expected = (EOFError, WireError, OSError, TransferRefused)
    with _channel(data) as channel, contextlib.suppress(*expected):
        ended(channel.receive())
    with _place() as folder, _channel(data) as channel, contextlib.suppress(*expected):
        done = unpack(channel, folder, "out", _LIMITS, merge=False)
        channel.check_end(done)


def _transfer_seeds() -> Iterator[bytes]:
    messages: list[Message] = [
        Pack("/workspace", _LIMITS, False),
        Failed(2, "No such file"),
        Failed(0, "it holds a device"),
        Transferred(2, 5, ["top/a: is a device"], 1),
    ]
    for message in messages:
        yield bytes(encode(message))
    for archive in _archive_seeds():
        content = archive[1:]
        pieces = [Chunk(content[start : start + 700]) for start in range(0, len(content), 700)]
        yield b"".join(encode(piece) for piece in pieces) + encode(Transferred(3, 9, [], 0))
        yield (
            b"".join(encode(piece) for piece in pieces)
            + encode(Chunk(b"")) * 2
            + encode(Transferred(3, 9, [], 0))
        )


@contextlib.contextmanager
def _place() -> Iterator[int]:
    """Yield a descriptor of an empty directory; nothing may be created beside it, or link out of it."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        here = Path(scratch, "in")
        here.mkdir()
        folder = os.open(here, os.O_RDONLY)
        try:
            yield folder
        finally:
            os.close(folder)
        assert [path.name for path in Path(scratch).iterdir()] == ["in"]
        for path in here.rglob("*"):
            if path.is_symlink():
                target = Path(os.path.normpath(path.parent / path.readlink()))
                assert target.is_relative_to(here), f"{path} leads to {target}"


def archive(data: bytes) -> None:
    """Unpack an untrusted archive: `unpack`. If the first byte is odd, its checksums are corrected."""
    content = bytearray(data[1:])
    if data and data[0] & 1:
        for start in range(0, len(content) - 511, 512):
            block = content[start : start + 512]
            block[148:156] = b" " * 8
            content[start + 148 : start + 156] = b"%06o\0 " % sum(block)
    with _place() as folder, contextlib.suppress(TransferRefused, OSError):
        unpack(io.BytesIO(content), folder, "out", _LIMITS, merge=bool(data and data[0] & 2))


def _archive_seeds() -> Iterator[bytes]:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        tree = Path(scratch, "tree")
        (tree / "a" / ("long" * 50)).mkdir(parents=True)
        (tree / "a" / "f").write_bytes(b"contents\n")
        (tree / "a" / "l").symlink_to("../g")
        for source in (tree, tree / "a" / "f"):
            out = io.BytesIO()
            pack(str(source), out, _LIMITS, skip_unsupported=False)
            # Without the padding behind the last member.
            yield b"\x01" + out.getvalue().rstrip(b"\0").ljust(1024, b"\0")
    for kind in (tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.GNUTYPE_SPARSE, tarfile.XHDTYPE):
        info = tarfile.TarInfo("top")
        info.type, info.linkname = kind, "../../etc"
        yield b"\x01" + info.tobuf(tarfile.GNU_FORMAT)


def reports(data: bytes) -> None:
    """Find a shell's report of a command's end, behind other output: `reports`."""
    reader = Reports()
    for piece in _cut(data):
        found = reader.feed(piece, NONCE)
        if NONCE.encode() not in data:
            assert found is None, "believed without the nonce"
            assert len(reader.rest) <= Reports.LIMIT
        if found is not None:
            assert 0 <= found[0] <= 999 and len(found[1]) <= Reports.LIMIT
    if NONCE.encode() not in data:
        assert reader.feed(f"{NONCE} 3 /dir\0".encode(), NONCE) == (3, "/dir"), "garbage hides the report"


def _report_seeds() -> Iterator[bytes]:
    yield b"\x05" + f"{NONCE} 0 /workspace\0".encode()
    yield b"\xff" + f"garbage{NONCE} 255 /a\nb \xff\0deadbeef 0 /\0".encode("latin-1")
    yield b"\x00" + f"{NONCE[:-1]} 0 /\0{NONCE}0 0 /\0".encode()


def image(data: bytes) -> None:
    """Parse an untrusted SIF: `sif`."""
    fd = os.memfd_create("image")
    try:
        os.write(fd, data)
        path = Path(f"/proc/self/fd/{fd}")
        with contextlib.suppress(SandboxError):
            found = system_partition(path)
            assert 0 <= found.offset < found.offset + found.size <= len(data)
        with contextlib.suppress(SandboxError):
            for name, value in labels(path).items():
                assert isinstance(name, str) and isinstance(value, str)
    finally:
        os.close(fd)


def _image_seeds() -> Iterator[bytes]:
    text = json.dumps({"data": {"attributes": {"labels": {"name": "value"}}}}).encode()
    header = struct.pack("<32s10s22x", b"#!/usr/bin/env run-singularity\n", b"SIF_MAGIC\0")
    header += struct.pack("<8q", 0, 0, 0, 2, 128, 2 * 585, 0, 0)
    system = struct.pack("<i?12xqq40x128xii376x", 0x4004, True, 1298, 64, 1, 2)
    described = struct.pack("<i?12xqq40x128xii376x", 0x4006, True, 1362, len(text), 0, 0)
    yield header + system + described + bytes(64) + text
    yield header


def patch(data: bytes) -> None:
    """Apply a patch as a model writes it to a file: `patch`, `patching`."""
    content, _, text = data.partition(b"\0")
    written = text.decode("utf-8", "replace")
    for candidate in (
        written,
        f"*** Begin Patch\n*** Update File: f\n{written}\n*** End Patch",
        f"--- a/f\n+++ b/f\n@@ -1 +1 @@\n{written}",
    ):
        with contextlib.suppress(EditError):
            for change in parse(candidate):
                if isinstance(change, Update):
                    patched(decode(content), change.hunks)


def _patch_seeds() -> Iterator[bytes]:
    yield b"a\nb\r\nc\0*** Begin Patch\n*** Update File: f\n@@ d\n a\n-b\n+x\n*** End of File\n*** End Patch"
    yield b"\0*** Begin Patch\n*** Add File: g\n+new\n*** Delete File: h\n*** End Patch"
    yield b"a\nb\n\0--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@ def\n a\n-b\n+c\n\\ No newline at end of file\n"
    yield b"a\nb\n\0@@ a\n-b\n+c\n"


def foreground(data: bytes) -> None:
    """Parse the kernel's data about the processes at a terminal: `foreground`."""
    text = data.decode("ascii", "replace")
    parse_call(text)
    watched(text)
    polled(data)
    selected(data)
    flags = [bool(byte >> bit & 1) for byte in data[:8] for bit in range(6)]
    processes = [ForegroundProcess(*flags[start : start + 6]) for start in range(0, len(flags), 6)]
    judge(processes, by_line=len(data) % 2 == 0)


def _foreground_seeds() -> Iterator[bytes]:
    yield b"0 0x0 0x7ffc5a1b2c30 0x1000 0x0 0x0 0x0 0x7ffc5a1b2be8 0x7f0a1b2c3d4e\n"
    yield b"running\n"
    yield b"-1 0x7ffc5a1b2be8 0x7f0a1b2c3d4e\n"
    yield b"pos:\t0\ntfd:        0 events:     2019 data: 0\ntfd:       11 events: 19 data: b\n"
    yield struct.pack("=ihh", 0, 1, 0) * 3


def kernel(data: bytes) -> None:
    """Process messages of a Jupyter kernel: `jupyter_output`."""
    try:
        messages = json.loads(data)
    except (ValueError, RecursionError):
        return
    output = CellOutput(1000)
    for kind, content in messages.items() if isinstance(messages, dict) else ():
        with contextlib.suppress(msgspec.ValidationError, RecursionError):  # as its caller does
            output.take(kind, content)
    reply = output.reply(timed_out=False, notice="")
    assert len(reply.output) < 5000
    assert decode_reply(bytes(encode(reply)[4:])) == reply


def _kernel_seeds() -> Iterator[bytes]:
    error = {"ename": "ValueError", "evalue": "x", "traceback": ["\x1b[31mred\x1b[0m", "line"]}
    shown = {"data": {"text/plain": "1", "text/html": "<b>", "application/json": {"a": [1]}}, "metadata": {}}
    messages = {"stream": {"name": "stdout", "text": "hi"}, "error": error, "display_data": shown}
    yield json.dumps(messages).encode()
    yield b'{"execute_result": {"data": {"text/html": "\\ud800"}}, "status": {"execution_state": "idle"}}'
    yield b'{"display_data": {"data": {"\\udfff": %b%b}}}' % (b"[" * 900, b"]" * 900)


TARGETS = {
    "frames": Target(frames, _frame_seeds),
    "terminal": Target(terminal, _terminal_seeds),
    "transfer": Target(transfer, _transfer_seeds),
    "archive": Target(archive, _archive_seeds),
    "reports": Target(reports, _report_seeds),
    "image": Target(image, _image_seeds),
    "patch": Target(patch, _patch_seeds),
    "foreground": Target(foreground, _foreground_seeds),
    "kernel": Target(kernel, _kernel_seeds),
}


def run(name: str, data: bytes) -> None:
    """Pass one input to a target. An exception is a finding."""
    TARGETS[name].run(data[:_SIZE])
