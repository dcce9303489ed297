"""The connection of head and node: authentication, messages, and hostile peers."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.env.base import Grade
from prorl_envs.rollout.api.types import StopReason, Trajectory, TurnRecord
from prorl_envs.rollout.episode.job import Attempt, AttemptReport, Spent
from prorl_envs.rollout.nodes.channel import ChannelClosed, accept, channel_pair, connect
from prorl_envs.rollout.nodes.messages import Collected, Forget, HeadHeartbeat, Hold, NodeHeartbeat, Report
from prorl_envs.rollout.nodes.result_codec import account_of, whole_report

pytestmark = pytest.mark.anyio

TOKEN = "0123456789abcdef"

type Head = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@asynccontextmanager
async def listening(head: Head) -> AsyncIterator[int]:
    """Open a port that `head` listens on."""
    tasks: list[asyncio.Task[None]] = []

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.create_task(head(reader, writer)))

    server = await asyncio.start_server(begin, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.gather(*tasks)


async def test_messages_arrive_in_order_both_ways() -> None:
    got: list[Any] = []

    async def head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = await accept(reader, writer, TOKEN)
        channel.send(Hold(closed=True, resample=False))
        channel.send(HeadHeartbeat())
        got.extend([await channel.receive() for _ in range(3)])
        channel.close()

    big = Collected(7, Report(True, None, 0.0, 0.0, 0.0, text=os.urandom(3_000_000)))
    async with listening(head) as port:
        channel = await connect("127.0.0.1", port, TOKEN)
        for message in (Forget("a"), big, NodeHeartbeat({"open": 2.0})):
            channel.send(message)
        assert [await channel.receive(), await channel.receive()] == [Hold(True, False), HeadHeartbeat()]
        with pytest.raises(ChannelClosed, match="lost"):
            await channel.receive()
        channel.close()
    assert got == [Forget("a"), big, NodeHeartbeat({"open": 2.0})]


async def test_neither_side_accepts_another_token() -> None:
    refused: list[str] = []

    async def head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with pytest.raises(ChannelClosed) as raised:
            await accept(reader, writer, "another token entirely")
        refused.append(raised.value.message)

    async with listening(head) as port:
        with pytest.raises(ChannelClosed, match=r"token|joined"):
            await connect("127.0.0.1", port, TOKEN)
    assert "no node's" in refused[0]


async def test_a_reflected_proof_is_refused() -> None:
    """A peer that echoes everything the other side sends does not know the token."""

    async def mirror(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(data)
        writer.close()

    async with listening(mirror) as port:
        with pytest.raises(ChannelClosed, match="another token"):
            await connect("127.0.0.1", port, TOKEN)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n" * 9, b"", b"prorl-envs node 1\n", b"\xff" * 500])
async def test_unauthenticated_peers_are_disconnected(said: bytes) -> None:
    async def head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with pytest.raises(ChannelClosed, match="no node's"):
            await accept(reader, writer, TOKEN)

    async with listening(head) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(said)
        writer.write_eof()
        await reader.read()
        writer.close()


@pytest.mark.parametrize("frame", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x03abc", b"\x00\x00\x00\x02\x91\x63"])
async def test_a_node_that_sends_garbage_is_disconnected(frame: bytes) -> None:
    async def head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = await accept(reader, writer, TOKEN)
        with pytest.raises(ChannelClosed, match=r"message|longer"):
            await channel.receive()
        channel.close()

    async with listening(head) as port:
        channel: Any = await connect("127.0.0.1", port, TOKEN)
        channel._writer.write(frame)
        with pytest.raises(ChannelClosed):
            await channel.receive()
        channel.close()


async def test_the_error_without_a_listener_names_the_remedy() -> None:
    async def head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise AssertionError("nobody connects")

    async with listening(head) as port:
        pass
    with pytest.raises(ChannelClosed, match=r"nodes\.port"):
        await connect("127.0.0.1", port, TOKEN)


async def test_a_pair_in_one_loop_behaves_like_a_connection() -> None:
    head, node = channel_pair()
    head.send(HeadHeartbeat())
    assert await node.receive() == HeadHeartbeat()
    node.send(Forget("x"))
    node.close()
    assert await head.receive() == Forget("x")
    for side in (head, node):
        with pytest.raises(ChannelClosed):
            await side.receive()
    head.send(HeadHeartbeat())  # dropped


text = st.text(st.characters(exclude_categories=()), max_size=20)  # lone surrogates too
trajectories = st.integers(0, 30).flatmap(
    lambda n: st.builds(
        Trajectory,
        ids=st.lists(st.integers(0, 2**31 - 1), min_size=n, max_size=n),
        loss_mask=st.lists(st.integers(0, 1), min_size=n, max_size=n),
        logprobs=st.lists(st.floats(-1e9, 0.0), min_size=n, max_size=n),
        turns=st.lists(
            st.builds(
                TurnRecord,
                start=st.integers(0, 99),
                end=st.integers(0, 99),
                finish_reason=st.just("stop"),
                weight_version=st.just("3"),
                server=st.just("http://x"),
                model_s=st.floats(0, 9),
                tools_s=st.floats(0, 9),
            ),
            max_size=2,
        ),
        drift=st.integers(0, 3),
        token_exact=st.booleans(),
        parent=st.none() | st.integers(0, 3),
        shared_prefix_len=st.integers(0, 30),
    )
)
accounts = st.builds(
    AttemptReport,
    prompted=st.booleans(),
    messages=st.lists(st.fixed_dictionaries({"role": text, "content": text}), max_size=3),
    tools=st.lists(st.fixed_dictionaries({"name": text}), max_size=2),
    trajectory=st.none() | trajectories,
    unfinished_answers=st.lists(trajectories, max_size=2).map(tuple),
    stop_reason=st.none() | st.sampled_from(StopReason),
    grade=st.none()
    | st.builds(
        Grade,
        reward=st.floats(-1e9, 1e9),
        components=st.dictionaries(st.just("part"), st.floats(0, 1)),
        evidence=st.dictionaries(text, st.integers() | text, max_size=2),
    ),
    spent=st.builds(Spent, st.floats(0, 9), st.floats(0, 9), st.floats(0, 9)),
)


@given(accounts)
def test_an_attempt_report_arrives_unchanged(account: AttemptReport) -> None:
    told = account_of(whole_report(Attempt(remote_report=account)))
    assert told == account
