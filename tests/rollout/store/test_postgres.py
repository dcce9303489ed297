"""Further promises of the PostgreSQL store, about broken sessions and other services."""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prorl_envs.config import ServiceSettings
from prorl_envs.errors import InputError
from prorl_envs.rollout.api.errors import Unavailable
from tests.rollout.store.test_store import group, result

psycopg = pytest.importorskip("psycopg")

from prorl_envs.rollout.store.postgres import SCHEMA, PostgresStore  # noqa: E402

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[PostgresStore]:
    store = await asyncio.to_thread(PostgresStore, url)
    try:
        yield store
    finally:
        await store.aclose()


async def end_sessions(url: str) -> None:
    """Kill every session of the store like a server restart, and wait until they are gone."""

    def end() -> None:
        with psycopg.connect(url, autocommit=True) as session:
            others = "pid <> pg_backend_pid() AND backend_type = 'client backend'"
            session.execute(f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE {others}")

    await asyncio.to_thread(end)


@asynccontextmanager
async def losing_answers(url: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Run a proxy to the server. Each time the event is set, the proxy loses the answer to the next COMMIT
    and closes the connection."""
    upstream = url.partition("host=")[2] + "/.s.PGSQL.5432"
    lose = asyncio.Event()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_unix_connection(upstream)

        async def answers() -> None:
            while data := await server_reader.read(65536):
                writer.write(data)

        answering = asyncio.create_task(answers())
        while data := await reader.read(65536):
            if b"COMMIT" in data and lose.is_set():
                lose.clear()
                answering.cancel()
                server_writer.write(data)
                with contextlib.suppress(asyncio.CancelledError):
                    await answering
                await server_reader.read(65536)
                break
            server_writer.write(data)
        server_writer.close()
        writer.close()
        answering.cancel()

    with tempfile.TemporaryDirectory(prefix="prpg-") as folder:
        server = await asyncio.start_unix_server(carry, Path(folder, ".s.PGSQL.5432"))
        async with server:
            yield url.partition("host=")[0] + f"host={folder}", lose
            server.close()


async def test_a_broken_session_is_opened_again(postgres_url: str) -> None:
    async with opened(postgres_url) as store:
        await store.submit([group("a")])
        await end_sessions(postgres_url)
        with pytest.raises(Unavailable, match="cannot be written"):
            await store.record(result("a"))
        with pytest.raises(Unavailable, match="cannot be read"):
            await store.results(0, 10)
        assert (await store.record(result("a"))).cursor == 1
        assert [r.job_id for r in await store.results(0, 10)] == ["a/0"]


HELD = "another session holds the lock"


async def test_a_service_that_lost_its_database_to_another_stops_writing(postgres_url: str) -> None:
    async with opened(postgres_url) as store:
        await store.submit([group("a")])
        await end_sessions(postgres_url)
        async with opened(postgres_url) as other:
            assert await other.submit([group("b")]) == [True]
            for _ in range(2):
                with pytest.raises(Unavailable):
                    await store.record(result("a"))
        said = ""
        while "another service had the database" not in said:
            with pytest.raises(Unavailable) as caught:
                await store.record(result("a"))
            assert said in ("", HELD), "the database ends the other's session when it comes to it"
            said = HELD if HELD in str(caught.value) else str(caught.value)


async def test_a_commit_whose_answer_is_lost_is_checked(postgres_url: str) -> None:
    async with losing_answers(postgres_url) as (url, lose), opened(url) as store:
        lose.set()
        assert await store.submit([group("a")]) == [True], "not Unavailable: it is there"
        assert not lose.is_set()
        assert await store.submit([group("a")]) == [False]
        lose.set()
        kept = await store.record(result("a"))
        assert (kept.cursor, await store.results(0, 10)) == (1, [kept])


async def test_an_unreachable_server_is_named_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be opened") as caught:
        PostgresStore(f"postgresql://me:hunter2@/db?host={tmp_path}")
    assert "hunter2" not in str(caught.value)
    with pytest.raises(InputError, match="URL"):
        PostgresStore("postgresql://[")


async def test_a_text_may_contain_characters_that_postgres_cannot_store(postgres_url: str) -> None:
    async with opened(postgres_url) as store:
        odd = group("a", metadata={"said": "nul \0 \x01"})
        await store.submit([odd])
        assert (await store.group("a")).request == odd.request


def test_the_setting_takes_files_and_urls() -> None:
    settings = ServiceSettings.model_validate({"store": "postgresql://me:hunter2@db/x"})
    assert "hunter2" not in repr(settings)
    assert ServiceSettings.model_validate({"store": "~/x.db"}).store == Path.home() / "x.db"


@pytest.mark.parametrize("version", [3, 99])
async def test_a_store_of_another_version_is_refused(postgres_url: str, version: int) -> None:
    async with opened(postgres_url):
        pass
    with psycopg.connect(postgres_url, autocommit=True) as session:
        session.execute(f"SET search_path = {SCHEMA}")
        session.execute("UPDATE owner SET format = %s", (version,))
    with pytest.raises(InputError, match=f"format {version}"):
        PostgresStore(postgres_url)
