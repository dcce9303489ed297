"""Setup behind a proxy that intercepts TLS with its own certificate authority, and setup without pip."""

import asyncio
import hashlib
import os
import pty
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest
import trustme

from prorl_envs.sandbox.drivers.probe import find_bwrap
from tests.checkouts import ROOT, copy_checkout
from tests.env.test_install import wheel
from tests.http_server import answering

pytestmark = pytest.mark.anyio

SYSTEM = "/etc/ssl/certs/ca-certificates.crt"


class InterceptingProxy:
    """An HTTP proxy that terminates TLS with certificates of its own authority, and forwards requests.

    Args:
        folder: folder of the authority's certificate.
    """

    def __init__(self, folder: Path) -> None:
        self._authority = trustme.CA()
        self.certificate = folder / "authority.pem"
        self._authority.cert_pem.write_to_path(str(self.certificate))
        self.url = ""
        self.intercepted: list[str] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, target, _ = head.splitlines()[0].split()
        assert method == "CONNECT", head
        host, _, port = target.rpartition(":")
        certificate = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._authority.issue_cert(host).configure_cert(certificate)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        async with AsyncExitStack() as stack:
            stack.callback(writer.close)
            with suppress(OSError):  # a client that does not trust the authority hangs up
                await writer.start_tls(certificate)
                self.intercepted.append(host)
                upstream = ssl.create_default_context()
                answers, requests = await asyncio.open_connection(host, int(port), ssl=upstream)
                stack.callback(requests.close)
                await asyncio.gather(_pump(reader, requests), _pump(answers, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[InterceptingProxy]:
    made = InterceptingProxy(tmp_path)
    async with await asyncio.start_server(made.handle, "127.0.0.1", 0) as server:
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield made


async def run(
    *command: str | Path, cwd: Path, proxy: InterceptingProxy, system: bool = False, **own: str
) -> tuple[int, str]:
    """Run a command as a user who has configured only the proxy and the variables `own`.

    Args:
        system: whether the system trusts only the proxy's authority.
    """
    home = proxy.certificate.parent
    places = {"HOME": str(home), "UV_CACHE_DIR": str(home / "cache"), "PIP_CONFIG_FILE": os.devnull}
    environ = {"PATH": "/usr/bin:/bin", **places, "HTTPS_PROXY": proxy.url, **own}
    bind = ["--dev-bind", "/", "/", "--ro-bind", proxy.certificate, SYSTEM]
    process = await asyncio.create_subprocess_exec(
        *([find_bwrap(), *bind, *command] if system else command),
        cwd=cwd, env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    said, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


@pytest.mark.thorough
@pytest.mark.parametrize("known", ["to nobody", "to uv", "to pip", "in pip's file", "to the system"])
async def test_uv_works_behind_a_proxy_that_intercepts_tls(
    proxy: InterceptingProxy, tmp_path: Path, known: str
) -> None:
    certificate = str(proxy.certificate)
    (tmp_path / "pip.conf").write_text(f"[global]\ncert = {certificate}\n")
    own = {
        "to nobody": {"UV_SYSTEM_CERTS": "false"},
        "to uv": {"SSL_CERT_FILE": certificate},
        "to pip": {"PIP_CERT": certificate},
        "in pip's file": {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf")},
        "to the system": {},
    }[known]
    install = ["pip", "install", "--no-deps", "--target", str(tmp_path / "site"), "six"]
    status, said = await run(
        ROOT / "scripts" / "uv.sh", *install, cwd=ROOT, proxy=proxy, system=known == "to the system",
        VENV=sys.prefix, **own,
    )  # fmt: skip
    if known == "to nobody":
        assert status != 0 and "UnknownIssuer" in said and not proxy.intercepted
    else:
        assert status == 0 and (tmp_path / "site" / "six.py").is_file(), said
        assert "pypi.org" in proxy.intercepted


@pytest.mark.thorough
@pytest.mark.timeout(600)
async def test_the_whole_setup_works_behind_such_a_proxy(proxy: InterceptingProxy, tmp_path: Path) -> None:
    """pip downloads uv, so pip must also trust the proxy."""
    checkout = copy_checkout(tmp_path / "checkout")
    status, said = await run(
        "scripts/setup.sh", "demo", cwd=checkout, proxy=proxy, system=True, SETUP_PYTHON=sys.executable
    )
    assert status == 0, said
    assert "installing uv" in said and (checkout / ".venv" / "bin" / "prorl-envs").is_file()
    assert {"pypi.org", "files.pythonhosted.org"} <= set(proxy.intercepted)


def test_a_user_without_home_gets_the_error_about_python(tmp_path: Path) -> None:
    """No interpreter is suitable, uv downloads none, and HOME is unset like in many containers."""
    checkout, programs = copy_checkout(tmp_path / "checkout"), tmp_path / "bin"
    programs.mkdir()
    stubs = [programs / f"python{version}" for version in ("3.12", "3.13", "3.14", "3", "")]
    for stub in (*stubs, programs / "uv", checkout / "scripts/unpack-python.sh"):
        stub.write_text("#!/bin/sh\nexit 1\n")
        stub.chmod(0o755)
    done = subprocess.run(
        [checkout / "scripts/setup.sh", "test"],
        env={"PATH": f"{programs}:/usr/bin:/bin"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "HOME" not in done.stderr and "hint: " in done.stderr


def test_uv_shows_progress_only_on_a_terminal(tmp_path: Path) -> None:
    command = [
        str(ROOT / "scripts" / "uv.sh"),
        "venv",
        "--clear",
        "--python",
        sys.executable,
        str(tmp_path / "v"),
    ]
    environ = {**os.environ, "VENV": sys.prefix}
    piped = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert piped.stderr == ""
    ours, its = pty.openpty()
    subprocess.run(command, env=environ, stderr=its, check=True)
    assert b"Creating virtual environment" in os.read(ours, 65536)
    os.close(ours)
    os.close(its)


def test_uv_takes_the_index_of_pips_configuration(tmp_path: Path) -> None:
    (tmp_path / "index" / "little").mkdir(parents=True)
    wheel(tmp_path / "index" / "little")
    with serving(tmp_path / "index") as url:
        (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {url}\n")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        environ |= {"VENV": sys.prefix, "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), "HOME": str(tmp_path)}
        command = [
            str(ROOT / "scripts" / "uv.sh"),
            "pip",
            "install",
            "--target",
            str(tmp_path / "site"),
            "little",
        ]
        subprocess.run(command, env=environ, check=True)
    assert (tmp_path / "site" / "little.py").is_file()


# Without pip.


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            return

    with answering(partial(Quiet, directory=str(folder))) as place:
        yield f"http://{place}"


def fetch(index: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "fetch-pip.py", folder],
        env={**os.environ, "PIP_INDEX_URL": index}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_newest_pip_that_this_python_runs_is_fetched(tmp_path: Path) -> None:
    (tmp_path / "index" / "pip").mkdir(parents=True)
    wheels = {"9.9": "", "10.2": ' data-requires-python="&gt;=3.9"', "10.1": "", "11.0rc1": ""}
    wheels |= {"11.0": " data-yanked", "12.0": ' data-requires-python="&gt;=3.99"'}
    page = ""
    for version, attributes in wheels.items():
        name = f"pip-{version}-py3-none-any.whl"
        (tmp_path / "index" / "pip" / name).write_text(version)
        digest = hashlib.sha256(version.encode()).hexdigest()
        page += f'<a href="../pip/{name}#sha256={digest}"{attributes}>{name}</a>\n'
    (tmp_path / "index" / "pip" / "index.html").write_text(page)
    with serving(tmp_path / "index") as url:
        done = fetch(url, tmp_path)
        assert done.stdout == f"{tmp_path}/pip-10.2-py3-none-any.whl\n", done.stderr
        assert (tmp_path / "pip-10.2-py3-none-any.whl").read_text() == "10.2"
        (tmp_path / "index" / "pip" / "pip-10.2-py3-none-any.whl").write_text("changed")
        assert "does not have the SHA-256" in fetch(url, tmp_path).stderr
        (tmp_path / "index" / "pip" / "index.html").write_text("")
        assert "lists no pip" in fetch(url, tmp_path).stderr
    assert "refused" in fetch(url, tmp_path).stderr
