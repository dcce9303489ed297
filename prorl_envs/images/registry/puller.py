"""Pulls of images from registries into the store of layers."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from prorl_envs.clock import Clock, SystemClock
from prorl_envs.errors import InputError, SandboxError
from prorl_envs.images.digest import of_value
from prorl_envs.images.layers import LayerStore
from prorl_envs.images.registry.client import (
    RegistryClient,
    RegistryError,
    RegistryRefused,
    RegistrySettings,
    endpoints_of,
    http_client,
)
from prorl_envs.images.registry.credentials import find_login
from prorl_envs.images.registry.documents import (
    BlobDescriptor,
    ImageManifest,
    ImageRefused,
    check_platform,
    host_platform,
    parse_config,
    parse_manifest,
)
from prorl_envs.images.registry.reference import ImageReference, parse_reference
from prorl_envs.images.threads import in_thread
from prorl_envs.images.unpack import UnpackLimits, unpack_layer
from prorl_envs.sandbox.filesystem.layered import LayeredImage, is_layered, read_layered

#: Part of the keys of layers: raise it if layers are unpacked differently.
_FORMAT = 1
_INDEX_DEPTH = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PullSettings:
    """Settings of pulls.

    Args:
        registry: how this cluster reaches registries.
        bases: local images by reference, used in place of a registry: directories, SIF files,
            `.layers.json` files.
        limits: limits of each layer.
        seconds: timeout of one pull.
        parallel: most layers that are downloaded or unpacked at once.
    """

    registry: RegistrySettings = field(default_factory=RegistrySettings)
    bases: Mapping[str, Path] = field(default_factory=dict)
    limits: UnpackLimits = field(default_factory=UnpackLimits)
    seconds: float = 3600.0
    parallel: int = 4


def find_base(reference: str, bases: Mapping[str, Path]) -> Path | None:
    """Return the local image that stands for a reference (a base alias); None if there is none.

    `ubuntu:24.04` and `docker.io/library/ubuntu:24.04` are the same.

    Raises:
        InputError: the reference or one of the aliases is invalid.
    """
    if reference in bases:
        return bases[reference]
    wanted = parse_reference(reference)
    return next((path for name, path in bases.items() if parse_reference(name) == wanted), None)


class ImagePuller:
    """Pulls images without another program.

    Args:
        store: store for layers and images.
        progress: called with a short line for each step.
        environ: environment to search for logins; None uses that of this process.
    """

    def __init__(
        self,
        store: LayerStore,
        settings: PullSettings | None = None,
        *,
        progress: Callable[[str], None] = lambda line: None,
        clock: Clock | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.store = store
        self.settings = settings or PullSettings()
        self._progress = progress
        self._clock = clock or SystemClock()
        self._environ = os.environ if environ is None else environ

    async def resolve(self, reference: str, *, refresh: bool = False) -> Path:
        """Return the path of an image: that of a base alias, or one in the store. Pull a missing image.

        Args:
            reference: reference, with or without `docker://`.
            refresh: whether to pull the image even if the store has it.

        Raises:
            InputError: the reference is invalid.
            SandboxError: the image cannot be pulled.
        """
        if (base := find_base(reference, self.settings.bases)) is not None:
            return base
        parsed, wanted = parse_reference(reference), host_platform()
        key = of_value({"format": _FORMAT, "reference": str(parsed), "platform": wanted})
        name = f"{parsed.repository.rpartition('/')[2][:48]}-{key[:16]}"
        if not refresh and (found := await in_thread(self.store.image, name)):
            return found
        image = await self._pull(parsed, wanted)
        with self.store.holding(image.layers):
            return await in_thread(self.store.write_image, name, image)

    async def pull(self, reference: str, *, platform: str = "") -> LayeredImage:
        """Return the layers and settings of a reference's image; download layers that are not in the store.

        Args:
            reference: as in `resolve`.
            platform: platform such as `linux/arm64`; "" is this machine's.

        Raises:
            InputError: the reference is invalid, or an alias of a SIF, which has no layers.
            SandboxError: the image cannot be pulled.
        """
        base = find_base(reference, self.settings.bases)
        if base is None:
            return await self._pull(parse_reference(reference), platform or host_platform())
        if is_layered(base):
            return await in_thread(read_layered, base)
        if base.is_dir():
            return LayeredImage(layers=(base.absolute(),))
        raise InputError(
            f"the image {base} for {reference} has no layers",
            hint="name a directory or a .layers.json file; unpack a tar first",
        )

    async def _pull(self, reference: ImageReference, platform: str) -> LayeredImage:
        check_platform(platform)
        self._progress(f"pulling {reference}")
        try:
            async with self._clock.timeout(self.settings.seconds), self._clients(reference) as clients:
                return await self._pull_from_any(clients, reference, platform)
        except TimeoutError as error:
            raise RegistryError(
                f"the pull of {reference} took more than {self.settings.seconds:g} s",
                hint="raise image_build_s; finished layers are kept",
            ) from error

    @asynccontextmanager
    async def _clients(self, reference: ImageReference) -> AsyncIterator[list[RegistryClient]]:
        registry = self.settings.registry
        async with http_client(registry) as http:
            clients = []
            for endpoint in endpoints_of(reference, registry):
                login = find_login(endpoint.registry, endpoint.repository, self._environ)
                clients.append(
                    RegistryClient(endpoint, http, login=login, attempts=registry.attempts, clock=self._clock)
                )
            yield clients

    async def _pull_from_any(
        self, clients: list[RegistryClient], reference: ImageReference, platform: str
    ) -> LayeredImage:
        for client in clients[:-1]:
            try:
                return await self._pull_from(client, reference, platform)
            except (RegistryError, ImageRefused) as error:
                self._progress(f"mirror skipped: {error.message}")
        return await self._pull_from(clients[-1], reference, platform)

    async def _pull_from(
        self, client: RegistryClient, reference: ImageReference, platform: str
    ) -> LayeredImage:
        manifest = await _find_manifest(client, reference.version, platform)
        config, digests = parse_config(await client.document(manifest.config), len(manifest.layers))
        parts = dict(zip(digests, manifest.layers, strict=True))  # a layer may occur twice
        slots = asyncio.Semaphore(self.settings.parallel)
        try:
            async with asyncio.TaskGroup() as group:
                for diff_id, blob in parts.items():
                    group.create_task(self._make_layer(client, diff_id, blob, slots))
        except* SandboxError as errors:
            raise _first(errors) from errors
        layers = [self.store.layer(_key(diff_id)) for diff_id in digests]
        if None in layers:
            raise RegistryError("a layer was evicted during the pull", hint="raise the limit of the store")
        return LayeredImage(layers=tuple(layer for layer in layers if layer), config=config)

    async def _make_layer(
        self, client: RegistryClient, diff_id: str, blob: BlobDescriptor, slots: asyncio.Semaphore
    ) -> None:
        async with slots, self.store.making(_key(diff_id), on_wait=self._waiting) as place:
            if place is None:
                return
            if blob.size > self.settings.limits.unpacked_bytes:
                raise RegistryRefused(
                    f"a layer has {blob.size} bytes, more than {self.settings.limits.unpacked_bytes}",
                    hint="raise image_build_bytes",
                )
            with self.store.downloading(blob.digest.removeprefix("sha256:"), blob.size) as file:
                self._progress(f"downloading {blob.digest[:19]} ({blob.size / (1 << 20):.1f} MiB)")
                await client.download(blob, file)
                self._progress(f"unpacking {blob.digest[:19]}")
                await self._unpack(file, place, diff_id)

    async def _unpack(self, file: BinaryIO, place: Path, diff_id: str) -> None:
        """Unpack in a thread. A cancellation stops the thread at its next read."""
        source = _StoppableFile(file)
        work = in_thread(
            unpack_layer, cast(BinaryIO, source), place, diff_id=diff_id, limits=self.settings.limits
        )
        working = asyncio.ensure_future(work)
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError:
            source.stopped.set()
            await asyncio.wait([working])
            raise

    def _waiting(self) -> None:
        self._progress("waiting for another process, which pulls the same layer")


class _StoppableFile:
    """File whose reads fail after `stopped` is set."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.stopped = threading.Event()

    def read(self, size: int) -> bytes:
        if self.stopped.is_set():
            raise EOFError("stopped")
        return self._file.read(size)


async def _find_manifest(client: RegistryClient, version: str, platform: str) -> ImageManifest:
    for _ in range(_INDEX_DEPTH + 1):
        found = parse_manifest(await client.manifest(version), platform)
        if isinstance(found, ImageManifest):
            return found
        version = found.digest
    raise ImageRefused("the image's indexes are nested too deeply")


def _key(diff_id: str) -> str:
    return f"oci{_FORMAT}-{diff_id.removeprefix('sha256:')}"


def _first(errors: BaseExceptionGroup[SandboxError]) -> SandboxError:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, SandboxError)
    return found
