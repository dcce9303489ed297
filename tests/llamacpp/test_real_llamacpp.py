"""The llama.cpp client and `check-llm` with a real server and a tiny random model made for the tests."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from prorl_envs.model.answer_checks import ProtocolError
from prorl_envs.model.http.client import ClientLimits
from prorl_envs.model.servers.compatibility_checks import CheckState, CheckSubject, check_server
from prorl_envs.model.servers.detect import Servers
from prorl_envs.model.servers.llamacpp import LlamaCppClient
from prorl_envs.model.servers.probe import probe
from prorl_envs.model.tokens.rendering import TemplateRenderer
from prorl_envs.model.types import Sampled, Sampling
from prorl_envs.rollout.api.types import Result
from prorl_envs.testing.tokenizer import END_OF_TEXT, builtin_renderer, save_tokenizer
from tests.support.vllm_server import free_port, process, wait_until_healthy

pytestmark = [pytest.mark.llamacpp, pytest.mark.anyio]

RENDERER = builtin_renderer()
PROMPT = RENDERER.prompt([{"role": "user", "content": "List the files."}])
GREEDY = Sampling(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server, python = os.environ.get("TEST_LLAMA_SERVER"), os.environ.get("TEST_GGUF_PYTHON")
    if not server or not python:
        pytest.skip("no llama.cpp: make test-llamacpp sets one up")
    folder = tmp_path_factory.mktemp("llamacpp")
    save_tokenizer(folder)
    recipe = Path(__file__).with_name("make_gguf.py")
    end = RENDERER.tokenizer.token_to_id(END_OF_TEXT)
    subprocess.run([python, recipe, folder / "tokenizer.json", str(end), folder / "tiny.gguf"], check=True)
    port = free_port()
    command = [server, "--model", str(folder / "tiny.gguf"), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--ctx-size", "8192", "--parallel", "2", "--threads", "1"]
    libraries = {"LD_LIBRARY_PATH": str(Path(server).resolve().parent)}
    log = folder / "server.log"
    with process(command, log, {**os.environ, **libraries}) as running:
        address = f"http://127.0.0.1:{port}"
        wait_until_healthy(address, running, log)
        yield address


@asynccontextmanager
async def talking(url: str, *stops: int) -> AsyncIterator[LlamaCppClient]:
    limits = ClientLimits(attempts=1)
    client = LlamaCppClient(url, stop_ids=stops, vocab_size=RENDERER.vocab_size, limits=limits)
    try:
        yield client
    finally:
        await client.aclose()


async def readable_answers(client: LlamaCppClient, sampling: Sampling, count: int) -> list[Sampled]:
    """Return `count` answers. The server loses answers that are not UTF-8, and reports an error."""
    found: list[Sampled] = []
    while len(found) < count:
        try:
            found.append(await client.generate(PROMPT, sampling, session="s"))
        except ProtocolError as error:
            assert "lost what it had sampled" in error.message
    return found


async def test_the_server_is_detected_and_probed(url: str) -> None:
    report = await probe(url)
    assert report.ok, report.problem
    assert report.model.endswith("tiny.gguf")
    client = Servers.of(RENDERER).connect(url)
    assert (await client.generate(PROMPT, Sampling(max_tokens=1), session="s")).ids
    assert client.protocol == "llamacpp"  # type: ignore[attr-defined]
    await client.aclose()


async def test_the_reported_probabilities_are_those_of_the_policy(url: str) -> None:
    """Many single tokens are sampled at two temperatures. Frequent tokens have the reported probabilities,
    and the distribution at the lower temperature is the sharpened distribution at the higher one."""
    async with talking(url) as client:
        said: dict[float, dict[int, float]] = {}
        for temperature in (0.7, 1.4):
            answers = await readable_answers(client, Sampling(temperature=temperature, max_tokens=1), 300)
            said[temperature] = {answer.ids[0]: answer.logprobs[0] for answer in answers}
            top = max(said[temperature], key=said[temperature].__getitem__)
            share = sum(answer.ids[0] == top for answer in answers) / len(answers)
            chance = 2.718281828 ** said[temperature][top]
            assert abs(share - chance) < 5 * (chance * (1 - chance) / len(answers)) ** 0.5
    both = sorted(said[0.7].keys() & said[1.4].keys(), key=said[0.7].__getitem__)
    low, high = both[0], both[-1]
    colder, hotter = (said[t][high] - said[t][low] for t in (0.7, 1.4))
    assert colder == pytest.approx(2 * hotter, rel=0.02), "a logit's difference over the temperature"


async def test_sampled_ids_sent_back_are_continued(url: str) -> None:
    async with talking(url) as client:
        whole = await client.generate(PROMPT, GREEDY, session="s")
        assert whole.finish_reason == "length" and len(whole.ids) == 12
        rest = await client.generate(
            [*PROMPT, *whole.ids[:5]], GREEDY.model_copy(update={"max_tokens": 7}), session="s"
        )
        assert rest.ids == whole.ids[5:]
        assert rest.cached_tokens is not None and rest.cached_tokens > 0
    async with talking(url, whole.ids[3]) as client:
        stopped = await client.generate(PROMPT, GREEDY, session="s")
        first = whole.ids.index(whole.ids[3])
        assert (stopped.ids, stopped.finish_reason) == (whole.ids[: first + 1], "stop")


async def test_an_answer_is_streamed_while_it_is_sampled(url: str) -> None:
    heard: list[int] = []
    async with talking(url) as client:
        whole = await client.generate(PROMPT, GREEDY, session="s")
        told = await client.stream(
            PROMPT, GREEDY, session="s", on_partial=lambda partial: heard.append(len(partial.ids))
        )
    assert (told.ids, told.finish_reason) == (whole.ids, "length")
    assert told.logprobs == pytest.approx(whole.logprobs, abs=1e-3)
    assert heard[0] == 0 and heard[-1] == 12 and len(set(heard)) > 2
    async with talking(url, whole.ids[3]) as client:
        stopped = await client.stream(PROMPT, GREEDY, session="s", on_partial=lambda _: None)
        assert (stopped.ids, stopped.finish_reason) == (
            whole.ids[: whole.ids.index(whole.ids[3]) + 1],
            "stop",
        )


async def test_a_seed_is_reproducible_and_a_long_prompt_is_refused(url: str) -> None:
    async with talking(url) as client:
        short = Sampling(max_tokens=1, seed=2**40)
        one, two = [(await client.generate(PROMPT, short, session="s")).ids for _ in range(2)]
        assert one == two
        with pytest.raises(ProtocolError, match="context"):
            await client.generate(PROMPT * 500, Sampling(max_tokens=1), session="s")


async def test_disconnecting_frees_the_slot_of_the_server(url: str) -> None:
    async with talking(url) as client:
        task = asyncio.ensure_future(client.generate(PROMPT, Sampling(max_tokens=900, seed=1), session="s"))
        await asyncio.wait([task], timeout=0.05)
        task.cancel()
        await asyncio.wait([task])
    async with httpx.AsyncClient() as asking:
        while any(slot["is_processing"] for slot in (await asking.get(f"{url}/slots")).json()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_check_llm_lists_the_missing_features(url: str) -> None:
    servers = Servers.of(RENDERER, limits=ClientLimits(attempts=1))
    client = servers.connect(url)
    subject = CheckSubject(client, servers, url, PROMPT)
    try:
        findings = {finding.id: finding for finding in await check_server(subject, pauses=True)}
    finally:
        await client.aclose()
    lost = {name for name, one in findings.items() if "lost what it had sampled" in one.reason}
    assert {name for name, one in findings.items() if one.state is CheckState.BROKEN} <= lost
    assert {"L8", "L9"} <= {name for name, one in findings.items() if one.state is CheckState.ABSENT}
    assert findings["L7"].state is CheckState.KEPT, findings["L7"]


def test_a_complete_rollout(url: str, tmp_path: Path) -> None:
    """A user's command runs the bash family in sandboxes; a real server samples."""
    save_tokenizer(tmp_path / "tokenizer")
    command = [Path(sys.executable).with_name("prorl-envs"), "run", "bash", "--llm", url]
    command += ["--tokenizer", tmp_path / "tokenizer", "--limit", "1", "--samples", "2"]
    command += ["--max-turns", "2", "--out", tmp_path / "runs"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = next(tmp_path.rglob("results.jsonl")).read_text().splitlines()
    results = [Result.model_validate(json.loads(line)) for line in lines]
    played = [result.trajectory for result in results if result.trajectory is not None]
    assert len(results) == 2 and played
    for trajectory in played:
        assert (trajectory.drift, trajectory.token_exact) == (0, True)
        assert sum(trajectory.loss_mask) == sum(turn.end - turn.start for turn in trajectory.turns)
    for result in results:
        assert result.failure is None or "lost what it had sampled" in result.failure.message


def test_the_renderer_is_the_models(url: str) -> None:
    """The server's tokenizer yields the same ids as ours."""
    text = "<|im_start|>user\nList the files.<|im_end|>\n"
    theirs = httpx.post(f"{url}/tokenize", json={"content": text, "parse_special": True}).json()["tokens"]
    renderer: TemplateRenderer = RENDERER
    assert renderer.decode(theirs) == text
