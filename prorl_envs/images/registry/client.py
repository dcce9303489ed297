"""Client of the OCI distribution protocol, for pulls (github.com/opencontainers/distribution-spec).

Registries are untrusted: answers have limits, all content with a digest is verified, and logins are sent only
to the registry and its token service.
"""

import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import BinaryIO

import httpx

from prorl_envs.clock import Clock, SystemClock
from prorl_envs.errors import SandboxError
from prorl_envs.images.registry.credentials import RegistryLogin
from prorl_envs.images.registry.documents import INDEXES, MANIFESTS, BlobDescriptor
from prorl_envs.images.registry.reference import DOCKER_HUB, ImageReference, is_digest
from prorl_envs.images.threads import in_thread

_DOCKER_HUB_HOST = "registry-1.docker.io"
_DOCUMENT_LIMIT = 4 << 20
_CHUNK = 1 << 20
#: Most bytes of a download that a broken connection loses.
_DOWNLOAD_CHUNK = 256 << 10
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
_REDIRECTS = 5
_PARAMETER = re.compile(r'(\w+)\s*=\s*"([^"]*)"')
_CONTENT_RANGE = re.compile(r"bytes (\d+)-")


class RegistryError(SandboxError):
    """Error of a registry: it is unreachable, does not answer, refuses, or breaks the protocol."""


class RegistryRefused(RegistryError):
    """Final refusal: the image is missing, denied or damaged."""

    retryable = False


class _Transient(Exception):
    """Failure after which the request is repeated.

    Args:
        wait_s: seconds to wait as requested by the registry; 0 if it did not request any.
    """

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class _NotResumed(_Transient):
    """Refusal to send the rest of a blob. The registry may still send the whole blob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrySettings:
    """How this cluster reaches registries.

    Args:
        mirrors: by registry, its mirrors in the order to try: `host`, `host:port`, `host/prefix`.
        insecure: hosts, with their ports, that are reached by plain HTTP.
        connect_s: timeout of a connection, in seconds.
        read_s: seconds without data after which an answer counts as lost.
        attempts: consecutive attempts of a request without progress.
    """

    mirrors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    insecure: tuple[str, ...] = ()
    connect_s: float = 10.0
    read_s: float = 60.0
    attempts: int = 5


@dataclass(frozen=True, slots=True)
class RegistryEndpoint:
    """Server from which a repository is pulled: its registry or a mirror.

    Args:
        registry: host, and port if it is not the default.
        repository: path of the repository on the server.
        insecure: whether the server uses plain HTTP.
    """

    registry: str
    repository: str
    insecure: bool = False

    @property
    def url(self) -> str:
        host = _DOCKER_HUB_HOST if self.registry == DOCKER_HUB else self.registry
        return f"{'http' if self.insecure else 'https'}://{host}/v2/{self.repository}"


def endpoints_of(reference: ImageReference, settings: RegistrySettings) -> list[RegistryEndpoint]:
    """Return the servers of an image in the order to try: the mirrors, then the registry."""
    found = []
    for mirror in (*settings.mirrors.get(reference.registry, ()), reference.registry):
        host, _, prefix = mirror.strip("/").partition("/")
        repository = f"{prefix}/{reference.repository}" if prefix else reference.repository
        found.append(RegistryEndpoint(host, repository, host in settings.insecure))
    return found


@asynccontextmanager
async def http_client(settings: RegistrySettings) -> AsyncIterator[httpx.AsyncClient]:
    """Yield the HTTP client for pulls. It uses the environment's proxy and certificate variables."""
    timeout = httpx.Timeout(settings.read_s, connect=settings.connect_s)
    async with httpx.AsyncClient(
        timeout=timeout, follow_redirects=True, max_redirects=_REDIRECTS, headers={"User-Agent": "prorl-envs"}
    ) as client:
        yield client


class RegistryClient:
    """Client of one repository.

    Args:
        login: login for the registry, if there is one.
        attempts: consecutive attempts of a request without progress.
    """

    def __init__(
        self,
        endpoint: RegistryEndpoint,
        http: httpx.AsyncClient,
        *,
        login: RegistryLogin | None = None,
        attempts: int = 5,
        clock: Clock | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._http = http
        self._login = login
        self._attempts = attempts
        self._clock = clock or SystemClock()
        self._authorization = ""

    async def manifest(self, version: str) -> bytes:
        """Return the manifest or index of a tag or digest.

        Raises:
            RegistryError: it cannot be downloaded, or has another digest.
        """
        data = await self._document(f"/manifests/{version}", ", ".join((*INDEXES, *MANIFESTS)))
        if is_digest(version):
            self._check(data, version)
        return data

    async def document(self, blob: BlobDescriptor) -> bytes:
        """Return a small blob, such as an image's configuration.

        Raises:
            RegistryError: it cannot be downloaded, or has another digest.
        """
        data = await self._document(f"/blobs/{blob.digest}", "*/*")
        self._check(data, blob.digest)
        return data

    async def download(self, blob: BlobDescriptor, file: BinaryIO) -> None:
        """Download a blob to a file. Resume if the file has the content of an interrupted download.

        Args:
            file: open for reading and writing.

        Raises:
            RegistryError: it cannot be downloaded, or has another digest (then the file is empty).
            OSError: the file cannot be written.
        """
        progress = await in_thread(_Progress, file, blob.size)

        async def attempt() -> None:
            try:
                await self._continue(blob, progress)
            except _NotResumed:
                await in_thread(progress.restart)
                raise

        while progress.size < blob.size:
            await self._retry(attempt, lambda: progress.size)
        if f"sha256:{progress.digest.hexdigest()}" != blob.digest:
            await in_thread(progress.restart)
            raise self._wrong_digest(blob.digest)
        file.seek(0)

    async def _continue(self, blob: BlobDescriptor, progress: "_Progress") -> None:
        headers = {"Range": f"bytes={progress.size}-"} if progress.size else {}
        async with self._get(f"/blobs/{blob.digest}", headers) as response:
            start = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
            resumes = response.status_code == 206 and start and int(start[1]) == progress.size
            if progress.size and not resumes:
                await in_thread(progress.restart)
            async for chunk in response.aiter_raw(_DOWNLOAD_CHUNK):
                if progress.size + len(chunk) > blob.size:
                    await in_thread(progress.restart)
                    raise self._refused(f"sent more than the {blob.size} bytes of {blob.digest}")
                await in_thread(progress.write, chunk)
        if progress.size < blob.size:
            raise _Transient("closed the connection early")

    async def _document(self, path: str, accept: str) -> bytes:
        async def attempt() -> bytes:
            async with self._get(path, {"Accept": accept}) as response:
                return await self._bounded(response)

        return await self._retry(attempt, lambda: 0)

    async def _bounded(self, response: httpx.Response) -> bytes:
        data = bytearray()
        async for chunk in response.aiter_raw():
            data += chunk
            if len(data) > _DOCUMENT_LIMIT:
                raise self._refused(f"sent a document of more than {_DOCUMENT_LIMIT} bytes")
        return bytes(data)

    async def _retry[T](self, attempt: Callable[[], Awaitable[T]], progress: Callable[[], int]) -> T:
        """Repeat an attempt after transient failures, with growing waits. Progress resets their number."""
        failures, reached = 0, progress()
        while True:
            try:
                return await attempt()
            except _Transient as error:
                failures = 0 if progress() >= reached + _CHUNK else failures
                failures, reached = failures + 1, progress()
                if failures >= self._attempts:
                    raise RegistryError(
                        f"the registry {self.endpoint.registry} {error}, {failures} times in a row",
                        hint="try again later, or set images.mirrors",
                    ) from error
                wait = max(_FIRST_WAIT_S * 2 ** (failures - 1), error.wait_s)
                await self._clock.sleep(min(wait, _LONGEST_WAIT_S))

    @asynccontextmanager
    async def _get(self, path: str, headers: Mapping[str, str]) -> AsyncIterator[httpx.Response]:
        """Yield a successful answer; log in if the registry requires it.

        Raises:
            _Transient: the request failed, and another attempt may succeed.
            RegistryRefused: the request failed finally.
        """
        for first in (True, False):
            try:
                async with self._http.stream(
                    "GET", self.endpoint.url + path, headers=self._headers(headers)
                ) as response:
                    if not self.endpoint.insecure and response.url.scheme != "https":
                        raise self._refused("redirects from HTTPS to plain HTTP")
                    if response.status_code == 401 and first:
                        challenge = response.headers.get("WWW-Authenticate", "")
                    else:
                        self._check_status(response, path)
                        yield response
                        return
            except httpx.TooManyRedirects as error:
                raise self._refused("redirects in a loop") from error
            except httpx.TransportError as error:
                raise _Transient(_reason(error)) from error
            except httpx.InvalidURL as error:
                raise self._refused("redirects to an invalid address") from error
            self._authorization = await self._authorize(challenge)

    def _headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        found = {"Accept-Encoding": "identity", **headers}
        return {**found, "Authorization": self._authorization} if self._authorization else found

    def _check_status(self, response: httpx.Response, path: str) -> None:
        status = response.status_code
        if status in (200, 206):
            return
        if status in _TRANSIENT:
            wait = response.headers.get("Retry-After", "")
            raise _Transient(f"answers {status}", float(wait) if wait.isdecimal() and len(wait) < 6 else 0.0)
        if status == 416:
            raise _NotResumed("does not resume the download")
        if status in (401, 403):
            raise self._refused(
                f"denies access to {self.endpoint.repository}", "log in: docker login, podman login"
            )
        if status == 404:
            raise self._refused(
                f"has no {self.endpoint.repository}{path}", "check name and tag; private images need a login"
            )
        raise self._refused(f"answers {status}")

    async def _authorize(self, challenge: str) -> str:
        """Return the Authorization header for a challenge (RFC 7235; token protocol of distribution/spec)."""
        scheme, _, rest = challenge.partition(" ")
        if scheme.lower() == "basic" and self._login is not None:
            return _basic(self._login)
        if scheme.lower() != "bearer":
            raise self._refused("asks for a login", "log in: docker login, podman login")
        found = dict(_PARAMETER.findall(rest))
        realm = found.get("realm", "")
        if not realm.startswith(("https://", "http://") if self.endpoint.insecure else "https://"):
            raise self._refused("names no safe token service")
        scope = found.get("scope") or f"repository:{self.endpoint.repository}:pull"
        return f"Bearer {await self._token(realm, {'service': found.get('service', ''), 'scope': scope})}"

    async def _token(self, realm: str, query: dict[str, str]) -> str:
        login = self._login
        if login is not None and login.identity_token:
            form = {**query, "grant_type": "refresh_token", "refresh_token": login.identity_token}
            request = self._http.build_request("POST", realm, data={**form, "client_id": "prorl-envs"})
        else:
            headers = {"Authorization": _basic(login)} if login else {}
            request = self._http.build_request("GET", realm, params=query, headers=headers)
        request.headers["Accept-Encoding"] = "identity"
        try:
            answer = await self._http.send(request, stream=True)
            try:
                data = await self._bounded(answer)
            finally:
                await answer.aclose()
        except (httpx.TransportError, httpx.TooManyRedirects, httpx.InvalidURL) as error:
            raise _Transient(f"has a token service that fails ({type(error).__name__})") from error
        if answer.status_code in _TRANSIENT:
            raise _Transient(f"has a token service that answers {answer.status_code}")
        try:
            values = json.loads(data) if answer.status_code == 200 else {}
            token = values.get("token") or values.get("access_token")
        except (ValueError, AttributeError, RecursionError) as error:
            raise self._refused("has a token service that sends no token") from error
        if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]{1,65536}", token):
            raise self._refused("denies a token", "check the login: docker login, podman login")
        return token

    def _check(self, data: bytes, digest: str) -> None:
        if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
            raise self._wrong_digest(digest)

    def _wrong_digest(self, digest: str) -> RegistryRefused:
        return self._refused(
            f"sent other content than {digest}", "the image was damaged there, or in transit"
        )

    def _refused(self, reason: str, hint: str = "") -> RegistryRefused:
        return RegistryRefused(
            f"the registry {self.endpoint.registry} {reason}", hint=hint or "check the registry's address"
        )


class _Progress:
    """File of a download, with the digest of its content.

    Args:
        limit: bytes of the whole download; a longer file is discarded.
    """

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self._file = file
        self.digest, self.size = hashlib.sha256(), 0
        file.seek(0)
        while chunk := file.read(_CHUNK):
            self.digest.update(chunk)
            self.size += len(chunk)
        if self.size > limit:
            self.restart()

    def restart(self) -> None:
        self.digest, self.size = hashlib.sha256(), 0
        self._file.seek(0)
        self._file.truncate()

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:  # an unbuffered file may write less
            view = view[self._file.write(view) :]
        self.digest.update(data)
        self.size += len(data)


def _basic(login: RegistryLogin) -> str:
    return "Basic " + base64.b64encode(f"{login.user}:{login.password}".encode()).decode()


def _reason(error: httpx.TransportError) -> str:
    if isinstance(error, httpx.TimeoutException):
        return "does not answer in time"
    return f"cannot be reached ({str(error)[:200] or type(error).__name__})"
