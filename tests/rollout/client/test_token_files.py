"""Service without a configured token: only clients of the same user can authenticate."""

import logging
import os
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from prorl_envs.config import ServerSettings
from prorl_envs.errors import InputError
from prorl_envs.rollout.api.errors import Unauthorized
from prorl_envs.rollout.client.client import RolloutClient
from prorl_envs.rollout.client.token_files import (
    Address,
    addresses_of,
    drop_token,
    read_token,
    stored_token,
    token_folder,
)
from prorl_envs.rollout.http.server import serving
from prorl_envs.rollout.service.service import RolloutService
from prorl_envs.testing.tokenizer import builtin_renderer
from tests.support.toy import ToyModel, ToyWorld, empty_node

pytestmark = pytest.mark.anyio

TOKEN = "a-token-of-sixteen-or-more"
ADDRESS = Address("127.0.0.1", 8600)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def new_service() -> RolloutService:
    renderer = builtin_renderer()
    model = ToyModel(renderer, lambda *_: "Hello.")
    return RolloutService(empty_node(), {"toy": ToyWorld().family()}, renderer, model)


@asynccontextmanager
async def served(settings: ServerSettings | None = None) -> AsyncIterator[str]:
    async with serving(new_service(), settings or ServerSettings(port=0)) as url:
        yield url


async def test_clients_of_the_same_user_need_no_configuration() -> None:
    async with served() as url:
        for address in (url, url.replace("127.0.0.1", "localhost")):
            async with RolloutClient(address) as client:
                assert (await client.status()).state == "serving"
        async with httpx.AsyncClient(base_url=url) as stranger:
            for method, path in (
                ("GET", "/v1/results"),
                ("GET", "/v1/status"),
                ("GET", "/metrics"),
                ("GET", "/openapi.json"),
                ("POST", "/v1/model_servers"),
                ("POST", "/add_llm_server"),
                ("POST", "/v1/logins"),
                ("GET", "/v1/dashboard"),
            ):
                assert (await stranger.request(method, path)).status_code == 401, path
            assert (await stranger.get("/health")).status_code == 200
    assert list(token_folder().iterdir()) == [], "it is gone with the service"


async def test_only_the_user_can_read_the_file() -> None:
    async with served() as url:
        [address] = addresses_of(url)
        [file] = token_folder().iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(token_folder().stat().st_mode) == 0o700
        assert len(read_token(address) or "") >= 32


def as_another_user(work: Callable[[], None]) -> int:
    """Return the exit status of `work` in a process of another user."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setresgid(54321, 54321, 54321)
            os.setresuid(54321, 54321, 54321)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
async def test_another_user_cannot_read_the_file(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        assert folder.stat()
    async with served() as url:
        [address] = addresses_of(url)

        def read() -> None:
            assert read_token(address) is None
            with pytest.raises(PermissionError):
                list(token_folder().iterdir())

        assert as_another_user(read) == 0


async def test_without_token_files_every_local_user_has_access() -> None:
    with stored_token(TOKEN, ADDRESS):
        pass
    async with served(ServerSettings(port=0, generate_token=False)) as url:
        assert not token_folder().exists() or not list(token_folder().iterdir())
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/v1/status")).status_code == 200


async def test_a_configured_token_is_in_no_file() -> None:
    async with served(ServerSettings(port=0, token=SecretStr(TOKEN))) as url:
        assert not token_folder().exists()
        async with RolloutClient(url) as nameless, RolloutClient(url, token=TOKEN) as known:
            assert (await known.status()).state == "serving"
            with pytest.raises(Unauthorized):
                await nameless.status()


async def test_a_client_survives_a_restart_with_another_token() -> None:
    async with served() as url:
        port = int(url.rpartition(":")[2])
        client = RolloutClient(url, timeout_s=30)
        await client.status()
        before = read_token(Address("127.0.0.1", port))
    async with served(ServerSettings(port=port)):
        assert read_token(Address("127.0.0.1", port)) != before
        assert (await client.status()).state == "serving"
        await client.aclose()


async def test_a_stale_file_is_replaced_or_removed() -> None:
    async with served() as url:
        port = int(url.rpartition(":")[2])
    stale = Address("127.0.0.1", port)
    left = stored_token(TOKEN, stale)
    left.__enter__()  # as written by a killed service
    async with served(ServerSettings(port=port)), RolloutClient(url) as client:
        assert (await client.status()).state == "serving"
    left = stored_token(TOKEN, stale)
    left.__enter__()
    async with served(ServerSettings(port=port, generate_token=False)):
        assert read_token(stale) is None


async def test_a_token_is_sent_to_loopback_only() -> None:
    assert addresses_of("http://127.0.0.1:8600/x") == [ADDRESS]
    assert addresses_of("http://localhost:8600") == [ADDRESS, Address("::1", 8600)]
    assert addresses_of("http://[::1]:8600") == [Address("::1", 8600)]
    for other in ("http://10.0.0.1:8600", "http://127.0.0.1.evil.test:8600", "https://127.0.0.1", "http://h"):
        assert addresses_of(other) == []
    sent: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request)
        return httpx.Response(401, json={"error": {"type": "unauthorized", "message": "no", "hint": ""}})

    with stored_token(TOKEN, ADDRESS):
        for url in ("http://localhost:8600", "http://10.0.0.1:8600", "http://127.0.0.1:8601"):
            async with RolloutClient(url, transport=httpx.MockTransport(answer)) as client:
                with pytest.raises(Unauthorized):
                    await client.status()
    assert [request.headers.get("authorization") for request in sent] == [f"Bearer {TOKEN}", None, None]
    assert sent[0].url.host == "127.0.0.1", "at the other address of localhost another user may listen"


def plant_nonsense(file: Path) -> None:
    file.write_bytes(b"\xff" * 2000)
    file.chmod(0o600)


def plant_folder(file: Path) -> None:
    file.mkdir(mode=0o700)


@pytest.mark.parametrize("plant", [plant_nonsense, plant_folder])
def test_a_file_that_is_not_a_token_file_is_not_read(plant: Callable[[Path], None]) -> None:
    with stored_token(TOKEN, ADDRESS) as file:
        file.unlink()
        plant(file)
        assert read_token(ADDRESS) is None


def test_a_link_at_the_files_path_is_replaced_and_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("as it was")
    with stored_token(TOKEN, ADDRESS) as file:
        pass
    file.symlink_to(precious)
    with stored_token(TOKEN, ADDRESS):
        assert read_token(ADDRESS) == TOKEN and not file.is_symlink()
    assert precious.read_text() == "as it was"


@pytest.mark.parametrize("named", ["XDG_STATE_HOME", "HOME"])
def test_a_folder_that_cannot_be_written_has_one_remedy(
    state: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    state.touch()
    if named == "HOME":
        monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv(named, str(state))
    with pytest.raises(InputError, match="cannot be written") as caught, stored_token(TOKEN, ADDRESS):
        pass
    assert caught.value.hint.startswith(f"set {named} to ")


def test_a_client_warns_once_of_a_token_that_it_cannot_read(
    state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state.touch()
    address = Address("127.0.0.1", 8601)
    assert read_token(address) is None and read_token(address) is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o755])
def test_a_folder_that_others_can_access_is_not_used(mode: int) -> None:
    with stored_token(TOKEN, ADDRESS) as file:
        file.parent.chmod(mode)
        assert read_token(ADDRESS) is None
        with pytest.raises(InputError, match="open to others"), stored_token(TOKEN, ADDRESS):
            pass
        file.parent.chmod(0o700)
    assert not file.exists()


def test_a_folder_that_is_a_link_is_not_used(tmp_path: Path) -> None:
    folder = token_folder()
    (tmp_path / "other").mkdir(mode=0o700)
    folder.parent.mkdir(parents=True)
    folder.symlink_to(tmp_path / "other")
    with pytest.raises(InputError, match="cannot be written"), stored_token(TOKEN, ADDRESS):
        pass
    assert list((tmp_path / "other").iterdir()) == []


def test_files_of_another_service_are_not_removed() -> None:
    with stored_token(TOKEN, ADDRESS):
        with stored_token("another-token-of-some-length", ADDRESS):
            pass
        assert read_token(ADDRESS) is None, "the later one took the place"
        with stored_token("a-third-token-of-some-length", ADDRESS):
            drop_token(ADDRESS, only=TOKEN)
            assert read_token(ADDRESS) == "a-third-token-of-some-length"


async def test_a_login_link_works_once() -> None:
    async with served() as url, RolloutClient(url) as client:
        link = await client.login_link()
        async with httpx.AsyncClient() as browser, httpx.AsyncClient() as other:
            assert (await browser.get(f"{url}/v1/status")).status_code == 401
            answer = await browser.get(link)
            assert (answer.status_code, answer.headers["location"]) == (303, "./")
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["cache-control"] == "no-store"
            attributes = answer.headers["set-cookie"].lower()
            assert "httponly" in attributes and "samesite=strict" in attributes
            assert (await browser.get(f"{url}/v1/status")).status_code == 200
            assert (await browser.post(f"{url}/v1/pause")).status_code == 200
            assert "set-cookie" not in (await other.get(link)).headers
            assert (await other.get(f"{url}/v1/status")).status_code == 401
            for foreign in (
                {"origin": "http://evil.test"},
                {"origin": "http://127.0.0.1:1"},
                {"sec-fetch-site": "same-site"},
                {"sec-fetch-site": "cross-site"},
            ):
                assert (await browser.post(f"{url}/v1/resume", headers=foreign)).status_code == 401
            wrong = {"authorization": "Bearer not-the-token-of-this"}
            assert (await browser.get(f"{url}/v1/status", headers=wrong)).status_code == 401


async def test_a_login_session_expires_with_its_service(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with served() as url, RolloutClient(url) as client, httpx.AsyncClient() as browser:
        link = await client.login_link()
        await browser.get(link)
        code = link.partition("code=")[2]
        cookies = dict(browser.cookies)
    async with served(ServerSettings(port=int(url.rpartition(":")[2]))), httpx.AsyncClient() as browser:
        answer = await browser.get(
            f"{url}/v1/status", headers={"cookie": "; ".join(map("=".join, cookies.items()))}
        )
        assert answer.status_code == 401
    own = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert not any(code in record.getMessage() for record in own)
