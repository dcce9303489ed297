"""Cost of one turn by the length of its history: transferred bytes, and CPU time of the parts of a turn.

python -m bench.turns

A request to a vLLM server contains the whole context as ids, and the answer repeats it, so their sizes grow
with the history. The table contains the CPU time of a turn with `NEW` new tokens after histories of several
lengths.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise

from bench.__main__ import machine
from prorl_envs.app.run_loop import run
from prorl_envs.model.servers.vllm import VllmClient
from prorl_envs.model.types import Sampled, Sampling
from prorl_envs.rollout.agent.token_ledger import Ledger

NEW = 150
SAMPLED = 100
VOCABULARY = 150_000


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer completion requests like vLLM, without parsing the numbers of a prompt."""
    ids = list(range(SAMPLED))
    logprobs = {"tokens": [f"token_id:{i}" for i in ids], "token_logprobs": [-0.5] * SAMPLED}
    said = json.dumps({"index": 0, "finish_reason": "stop", "token_ids": ids, "logprobs": logprobs})[:-1]
    while head := await reader.readuntil(b"\r\n\r\n"):
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        if not length:  # a GET request for the server's properties, which this server does not have
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            continue
        body = await reader.readexactly(int(length))
        start = body.index(b'"prompt":[') + len(b'"prompt":')
        prompt = body[start : body.index(b"]", start) + 1]
        choice = said.encode() + b',"prompt_token_ids":' + prompt + b"}"
        content = b'{"choices":[' + choice + b"]}"
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
        await writer.drain()


async def serve() -> None:
    """Print the URL, then answer until standard input ends."""

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(guarded, "127.0.0.1", 0, limit=2**24)
    async with server:
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def turn(client: VllmClient, context: list[int], ledger: Ledger, chance: random.Random) -> list[float]:
    """Run one turn like the agent loop. Return the CPU seconds of the ledger's check, of the model call, and
    of the growth of ledger and context."""
    marks = [time.process_time()]
    ledger.sent(context)
    marks.append(time.process_time())
    sampled: Sampled = await client.generate(context, Sampling(max_tokens=SAMPLED), session="s")
    marks.append(time.process_time())
    observed = [chance.randrange(VOCABULARY) for _ in range(NEW - SAMPLED)]
    ledger.sampled(sampled, 0.1)
    context.extend(sampled.ids)
    ledger.observed(observed)
    context.extend(observed)
    marks.append(time.process_time())
    return [after - before for before, after in pairwise(marks)]


async def measure(url: str, tokens: int, turns: int) -> list[float]:
    """Return the median CPU milliseconds of a turn's parts after a history of `tokens` tokens."""
    chance = random.Random(tokens)
    context = [chance.randrange(VOCABULARY) for _ in range(tokens)]
    ledger = Ledger(context)
    client = VllmClient(url, stop_ids=(1,), vocab_size=VOCABULARY, model="m")
    try:
        await turn(client, context, ledger, chance)  # connects
        rows = [await turn(client, context, ledger, chance) for _ in range(turns)]
    finally:
        await client.aclose()
    assert ledger.trajectory().drift == 0
    return [statistics.median(column) * 1e3 for column in zip(*rows, strict=True)]


async def bench(histories: Sequence[int], turns: int) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.turns", "--serve"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        url = (await process.stdout.readline()).decode().strip()
        print(TABLE)
        for tokens in histories:
            check, call, growth = await measure(url, tokens, turns)
            size = len(json.dumps([*range(VOCABULARY - tokens, VOCABULARY)], separators=(",", ":")))
            cells = f"{check:.3f} | {growth:.3f} | {call:.2f}"
            print(f"| {tokens:,} | {size / 1e3:,.0f} | {NEW * 7 / 1e3:.1f} | {cells} |", flush=True)
    finally:
        process.stdin.close()
        await process.wait()


TABLE = f"""
CPU of a turn with {NEW} new tokens, in ms:

| history, tokens | kB sent | of them new | ledger check | its growth | model call |
|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.turns", description=__doc__)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--histories", default="1000,8000,32000,128000")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
        return
    print(machine())
    run(bench([int(part) for part in options.histories.split(",")], options.turns))


if __name__ == "__main__":
    main()
