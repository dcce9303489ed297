"""A store that other programs read while the service writes to it."""

import json
import os
import sqlite3
from pathlib import Path

import pytest

from prorl_envs.errors import InputError
from prorl_envs.rollout.api.dashboard import SearchPage
from prorl_envs.rollout.api.summary import summarise
from prorl_envs.rollout.api.types import GroupRequest, Result, Selection
from prorl_envs.rollout.store.base import NewGroup
from prorl_envs.rollout.store.read_only import StoredEpisodes
from prorl_envs.rollout.store.sql import SqlStore
from prorl_envs.rollout.store.sqlite import MemoryStore, SqliteStore
from tests.viewer.conftest import result

pytestmark = pytest.mark.anyio

ROW = {"id": "fix-it", "instruction": "Do."}


async def keep(store: SqlStore, *results: Result) -> list[Result]:
    """Store results, and mark them as read with the next write."""
    groups = dict.fromkeys(one.group_id for one in results)
    await store.submit(
        [NewGroup(GroupRequest(id=g, environment="bash", task=ROW, samples=8), "t") for g in groups]
    )
    kept = [await store.record(one) for one in results]
    store.acknowledge([one.cursor for one in kept])
    return kept


def result_with_text(job: str, words: str) -> Result:
    return result(job, messages=[{"role": "user", "content": words}])


async def test_a_store_is_read_while_its_service_writes(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SqliteStore(path)
    kept = await keep(store, result("g/0"), result("g/1", reward=0.0), result_with_text("h/0", "näher"))
    episodes = StoredEpisodes(path)
    assert episodes.extend(1) and episodes.read == 1 < episodes.size == 3
    assert not episodes.extend() and episodes.summaries == [summarise(one) for one in kept]
    assert [Result.model_validate_json(episodes.line(n)) for n in range(3)] == kept
    [late] = await keep(store, result("h/1"))
    assert not episodes.extend() and episodes.summaries[3:] == [summarise(late)]
    assert episodes.search("näher") == ([2], 4) and episodes.search("Mend", 1) == ([1, 3], 4)
    assert episodes.search("Mend", 0, 1) == ([0], 1) and episodes.search("Mend", 4) == ([], 4)
    with pytest.raises(InputError, match="no episode 4"):
        episodes.line(4)
    episodes.close()
    await store.aclose()


async def test_a_result_that_the_service_dropped_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SqliteStore(path, max_results=2)
    await keep(store, result("g/0"), result("g/1"))
    episodes = StoredEpisodes(path)
    episodes.extend()
    await keep(store, result("h/0"))
    with pytest.raises(InputError, match="no longer kept"):
        episodes.line(0)
    assert not episodes.extend() and len(episodes.summaries) == 3
    assert episodes.search("Mend") == ([1, 2], 3)
    episodes.close()
    await store.aclose()


async def test_a_store_is_read_in_a_read_only_folder(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir()
    store = SqliteStore(folder / "store.db")
    await keep(store, result("g/0"))
    await store.aclose()
    before = sorted(folder.iterdir())
    folder.chmod(0o500)
    try:
        episodes = StoredEpisodes(folder / "store.db")
        episodes.extend()
        assert [one.job_id for one in episodes.summaries] == ["g/0"]
        episodes.close()
        assert os.geteuid() == 0 or sorted(folder.iterdir()) == before
    finally:
        folder.chmod(0o700)


async def test_a_file_that_is_not_a_store_is_one_clear_error(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE t (x)")
    other.close()
    for name, words in (("other.db", "another program"), ("none.db", "cannot be read")):
        with pytest.raises(InputError, match=words):
            StoredEpisodes(tmp_path / name)
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_both_stores_summarise_and_search_equally(kind: str, tmp_path: Path) -> None:
    store: SqlStore = (
        MemoryStore(max_results=5) if kind == "memory" else SqliteStore(tmp_path / "s", max_results=5)
    )
    await keep(store, result_with_text("alice/g/0", "gone"))
    kept = await keep(
        store,
        *(result_with_text(f"alice/g/{n}", f'word {n} "a\nb"') for n in range(1, 4)),
        result_with_text("bob/g/0", "word"),
        result("x/0"),
    )
    assert await store.summaries(0, 9) == [summarise(one) for one in kept]
    alice = Selection(prefix="alice/")
    assert [one.sample for one in await store.summaries(2, 9, only=alice)] == [2, 3]
    assert [one.sample for one in await store.summaries(0, 1)] == [1]
    assert await store.search("word", 0, 99, only=alice) == SearchPage(
        jobs=[f"alice/g/{n}" for n in (1, 2, 3)], next=4
    )
    assert await store.search("word", 0, 2) == SearchPage(jobs=["alice/g/1", "alice/g/2"], next=3), (
        "a step of it"
    )
    assert await store.search("word", 3, 2) == SearchPage(jobs=["alice/g/3", "bob/g/0"], next=5)
    assert await store.search("word", 6, 2) == SearchPage(jobs=[], next=6), "nothing is left"
    assert (await store.search('"a\nb"', 0, 99)).jobs == [f"alice/g/{n}" for n in (1, 2, 3)]
    assert (await store.search("Word", 0, 99)).jobs == []
    assert (await store.search("loss_mask", 0, 99)).jobs == [], "the tokens are not looked at"
    await store.aclose()


async def test_forks_are_counted(tmp_path: Path) -> None:
    whole = result().trajectory
    assert whole is not None
    store = SqliteStore(tmp_path / "s")
    [forked] = await keep(store, result("g/0", forks=[whole]))
    await store.aclose()
    episodes = StoredEpisodes(tmp_path / "s")
    episodes.extend()
    assert episodes.summaries == [summarise(forked)] and episodes.summaries[0].rows == 2
    assert json.loads(episodes.line(0))["forks"] == [whole.model_dump()]
    episodes.close()


async def test_an_open_store_of_several_machines_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prorl_envs.rollout.store.sqlite._shared", lambda folder: True)
    store = SqliteStore(tmp_path / "s")
    [kept] = await keep(store, result("g/0"))
    with pytest.raises(InputError, match="locked"):
        StoredEpisodes(tmp_path / "s")
    await store.aclose()
    assert not (tmp_path / "s-shm").exists(), "no memory is shared"
    episodes = StoredEpisodes(tmp_path / "s")
    episodes.extend()
    assert episodes.summaries == [summarise(kept)]
    episodes.close()
