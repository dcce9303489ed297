"""Builds of Dockerfiles with real sandboxes, on a base with busybox."""

import asyncio
import io
import lzma
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from prorl_envs.errors import ProrlError
from prorl_envs.images.dockerfile.build import BuildProgress, DockerfileBuilder, DockerfileLimits
from prorl_envs.images.dockerfile.copy_files import CopyLimits, SourceTree
from prorl_envs.images.dockerfile.ignore import IgnoreRules
from prorl_envs.images.dockerfile.parser import DockerfileError
from prorl_envs.images.dockerfile.run import RunFailed
from prorl_envs.images.layers import LayerStore
from prorl_envs.images.registry.puller import ImagePuller, PullSettings
from prorl_envs.sandbox.base import Network
from prorl_envs.sandbox.drivers.bubblewrap import BubblewrapDriver
from prorl_envs.sandbox.filesystem.layered import LAYER_LIMIT, LayeredImage, read_layered
from tests.sandbox.network.test_network import web

pytestmark = pytest.mark.anyio


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Project:
    """Build context, store and builder of a test."""

    def __init__(self, root: Path, driver: BubblewrapDriver, rootfs: Path, run_dir: Path) -> None:
        self.context, self.store = root / "context", LayerStore(root / "store")
        self.context.mkdir()
        self.events: list[BuildProgress] = []
        puller = ImagePuller(self.store, PullSettings(bases={"base": rootfs}))
        self.builder = DockerfileBuilder(self.store, driver, puller=puller, scratch=run_dir)

    def write(self, **files: str) -> None:
        for name, content in files.items():
            (self.context / name).write_text(content)

    async def build(self, text: str, **options: Any) -> LayeredImage:
        """Build `FROM base` and a text; return the image."""
        return await self.build_all(f"FROM base\n{text}", **options)

    async def build_all(self, text: str, **options: Any) -> LayeredImage:
        self.events.clear()
        (self.context / "Dockerfile").write_text(text)
        path = await self.builder.build(self.context, on_progress=self.events.append, **options)
        return read_layered(path)

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events if event.kind in ("made", "shared")]

    def incoming(self) -> list[str]:
        return names(self.store.root / "incoming")


@pytest.fixture
def project(tmp_path: Path, driver: BubblewrapDriver, rootfs: Path, run_dir: Path) -> Project:
    return Project(tmp_path, driver, rootfs, run_dir)


def files_of(image: LayeredImage) -> Mapping[str, str]:
    """Return the regular files above the base by path."""
    entries = SourceTree(image.layers).walk("", CopyLimits(), IgnoreRules(()))
    return {
        entry.path: entry.host.read_text()
        for entry in entries
        if entry.host.is_file() and not entry.host.is_relative_to(image.layers[0])
    }


async def test_instructions_change_files_and_settings(project: Project) -> None:
    project.write(hello="hi\n")
    image = await project.build(
        "ARG who=world\n"
        'ENV greeting="hello $who"\n'
        "WORKDIR /app\n"
        "WORKDIR sub\n"
        "COPY hello .\n"
        'RUN echo "$greeting, $who: $(cat hello)" > said && rm /etc/image\n'
        'RUN ["/bin/sh", "-c", "id -u > uid"]\n'
        "RUN <<EOF\necho $greeting > doc\npwd >> doc\nEOF\n"
        "RUN cat > from_stdin <<EOF\n$who\nEOF\n"
        "COPY <<EOF /etc/made\n'$greeting' \\$x\nEOF\n"
        'SHELL ["/bin/sh", "-ec"]\n'
        "USER app\nEXPOSE 80 81/udp\nVOLUME /data\nLABEL a=b c='d e'\nSTOPSIGNAL TERM\n"
        'ENTRYPOINT ["/bin/app"]\nCMD serve it\nHEALTHCHECK --interval=1m30s --retries=2 CMD true\n'
    )
    found = files_of(image)
    assert {name: found[name] for name in ("app/sub/said", "app/sub/uid", "app/sub/doc", "etc/made")} == {
        "app/sub/said": "hello world, world: hi\n",
        "app/sub/uid": "0\n",
        "app/sub/doc": "hello world\n/app/sub\n",
        "etc/made": "'hello world' $x\n",
    }
    assert found["app/sub/from_stdin"] == "world\n"
    assert "etc/image" not in found
    config = image.config
    assert config.env == {"greeting": "hello world"}
    assert config.workdir == "/app/sub"
    assert config.entrypoint == ("/bin/app",)
    assert config.command == ("/bin/sh", "-ec", "serve it")
    assert config.healthcheck == {"Test": ["CMD-SHELL", "true"], "Interval": 90 * 10**9, "Retries": 2}


async def test_stages_and_copies_between_them(project: Project) -> None:
    text = (
        "FROM base AS build\nRUN mkdir -p /out/d && echo built > /out/d/file && ln -s d/file /out/link\n"
        "FROM base AS unused\nRUN exit 1\n"
        "FROM scratch\nCOPY --from=build /out/ /copied/\nCOPY --from=base etc/image /image\n"
    )
    image = await project.build_all(text)
    assert files_of(image) == {
        "copied/d/file": "built\n",
        "copied/link": "built\n",
        "image": "from the image\n",
    }
    assert project.kinds().count("made") == 4  # with the empty layer of `scratch`


async def test_a_folder_can_be_added_to_the_path_of_a_base_that_sets_none(project: Project) -> None:
    image = await project.build(
        "ENV PATH=/opt/tools:${PATH}\nRUN mkdir -p /opt/tools && echo $PATH > /path\n"
    )
    path = "/opt/tools:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    assert (image.config.env, files_of(image)["path"]) == ({"PATH": path}, f"{path}\n")


async def test_a_stage_inherits_variables_of_its_parent_only(project: Project) -> None:
    text = (
        "ARG G=global\n"
        "FROM base AS one\nARG G\nARG V=1 E=arg\nENV E=env O=env\nARG O=arg\n"
        'RUN [ "$G$V$E$O" = global1envarg ]\n'
        'FROM one AS two\nRUN [ "$G$V$E$O" = global1envenv ]\nARG V\nARG G=stage\n'
        'FROM two\nRUN [ "$G$V" = stage1 ]\nARG V=2\nRUN echo "$V" > /v\n'
        'FROM base AS sibling\nCOPY --from=2 /v /v\nRUN [ "$G$V$E$O" = "" ]\nARG V\nRUN [ "$V" = "" ]\n'
    )
    image = await project.build_all(text)
    assert (image.config.env, files_of(image)["v"]) == ({}, "2\n")
    await project.build_all(text.replace("= global1", "= global3"), args={"V": "3"}, target="one")


async def test_an_entry_point_resets_the_command_of_its_base_only(project: Project) -> None:
    text = 'FROM base AS one\nCMD serve\nENTRYPOINT ["/a"]\nFROM one\nENTRYPOINT ["/b"]\n'
    assert (await project.build_all(text, target="one")).config.command == ("/bin/sh", "-c", "serve")
    assert (await project.build_all(text)).config.command == ()


async def test_symbolic_modes_of_copies_and_documents(project: Project) -> None:
    project.write(a="1")
    image = await project.build(
        "ARG mode=go=rX\nCOPY --chmod=u=rwx,$mode a /copied\nADD --chmod=+x a /added\n"
        "COPY --chmod=a+x <<EOF /document\nx\nEOF\n"
        "RUN stat -c %a /copied /added /document > /modes\n"
    )
    assert files_of(image)["modes"].split() == ["744", "755", "755"]


async def test_a_second_build_runs_nothing(project: Project) -> None:
    project.write(a="1")
    text = "WORKDIR /w\nCOPY a .\nRUN cat a > b\nRUN true\n"
    first = await project.build(text)
    assert project.kinds() == ["made"] * 4
    assert await project.build(text) == first
    assert project.kinds() == ["shared"] * 4
    assert not [event for event in project.events if event.kind == "output"]
    project.write(a="2")
    changed = await project.build(text)
    assert project.kinds() == ["shared", "made", "made", "made"]
    assert files_of(changed)["w/b"] == "2"


async def test_arguments_and_variables_are_part_of_the_key(project: Project) -> None:
    text = "ARG v=1\nRUN echo $v > /v\n"
    await project.build(text)
    assert files_of(await project.build(text, args={"v": "2"}))["v"] == "2\n"
    assert project.kinds() == ["made"]
    await project.build("LABEL a=b\n" + text)
    assert project.kinds() == ["shared"]  # a label changes no command


async def test_an_argument_that_nothing_declares_is_noted(project: Project) -> None:
    await project.build("ARG a", args={"a": "1", "b": "2", "http_proxy": "http://x"})
    notes = [event.text for event in project.events if event.kind == "note"]
    assert notes == ["the argument b is not used: no ARG declares it"]


async def test_a_command_without_changes_makes_no_layer(project: Project) -> None:
    first = await project.build("RUN echo x > /x")
    assert (await project.build("RUN echo x > /x\nRUN ls /\nENV a=b")).layers == first.layers
    image = await project.build("RUN echo x > /x\nRUN echo y > /opt/y && rm /opt/y")
    assert image.layers == first.layers


async def test_removed_files_stay_removed(project: Project) -> None:
    image = await project.build(
        "RUN mkdir /d && echo 1 > /d/old\nRUN rm -r /d && mkdir /d && echo 2 > /d/new"
    )
    assert {name for name in files_of(image) if name.startswith("d/")} == {"d/new"}


async def test_a_failed_command_names_its_line_and_shows_its_output(project: Project) -> None:
    with pytest.raises(RunFailed) as raised:
        await project.build("ENV a=b\nRUN for i in 1 2 3; do echo line $i; done; exit 3")
    message = str(raised.value)
    assert "Dockerfile:3: RUN failed with exit status 3" in message
    assert "line 1\nline 2\nline 3" in message
    assert project.incoming() == []
    assert files_of(await project.build("ENV a=b\nRUN echo ok > /x"))["x"] == "ok\n"


async def test_a_command_has_a_time_limit(project: Project) -> None:
    project.builder.limits = DockerfileLimits(run_s=0.5)
    with pytest.raises(RunFailed, match=r"did not finish in 0\.5 s"):
        await project.build("RUN sleep 1000")


async def test_a_missing_program_is_an_error_of_the_command(project: Project) -> None:
    with pytest.raises(RunFailed, match="none"):
        await project.build('RUN ["/bin/none"]')


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("COPY ../x /y", "2: COPY: ../x leads out"),
        ("COPY x /y", "2: COPY: x is not in the build context"),
        ("COPY out /y", "2: COPY: out is not in the build context"),
        ("ADD out/passwd /y", "2: ADD: out/passwd is not in the build context"),
        ("COPY a b /y", "several sources need a directory"),
        ("COPY a", "needs a source and a destination"),
        ("COPY --chmod=u+z a /y", "--chmod=u+z is not a mode"),
        ("ADD --chmod=u=r, a /y", "--chmod=u=r, is not a mode"),
        ("COPY --chmod=888 a /y", "--chmod=888 is not a mode"),
        ("COPY --chmod=17777 a /y", "--chmod=17777 is not a mode"),
        ("COPY --from=none a /y", "2: COPY"),
        ("ADD git@github.com:a/b.git /y", "is not supported"),
        ("ENV a", "needs NAME=value"),
        ("ENV a=b c", "is not NAME=value"),
        ("ARG 1=x", "declares no argument"),
        ("SHELL /bin/sh", "needs a JSON list"),
        ("HEALTHCHECK --interval=1x CMD x", "not a duration"),
        ("RUN --security=insecure x", "not supported"),
        ("RUN --mount=type=secret,id=s,required=true x", "needs the secret s"),
        ("COPY '$a /y", "single quote"),
    ],
)
async def test_errors_of_instructions(project: Project, tmp_path: Path, text: str, part: str) -> None:
    (project.context / "out").symlink_to("/etc")
    project.write(a="1", b="2")
    project.builder.puller = _NoRegistry(project.store, project.builder.puller.settings)
    with pytest.raises(ProrlError) as raised:
        await project.build(text)
    assert part in str(raised.value)


class _NoRegistry(ImagePuller):
    """Puller of local images only."""

    async def pull(self, reference: str, *, platform: str = "") -> LayeredImage:
        if reference not in self.settings.bases:
            raise DockerfileError("there is no registry", file="Dockerfile", line=2, instruction="COPY")
        return await super().pull(reference, platform=platform)


async def test_a_link_out_of_the_context_is_copied_as_a_link(project: Project, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    (project.context / "d").mkdir()
    (project.context / "d" / "out").symlink_to(tmp_path / "secret")
    image = await project.build("COPY d /d\nRUN cat /d/out > /stolen || true")
    assert image.layers[1].joinpath("d/out").is_symlink()
    assert files_of(image)["stolen"] == ""


async def test_an_ignore_file_that_is_a_link_is_refused(project: Project, tmp_path: Path) -> None:
    (project.context / ".dockerignore").symlink_to("/etc/passwd")
    with pytest.raises(DockerfileError, match=r"\.dockerignore: cannot be read"):
        await project.build("RUN true")


@pytest.mark.parametrize("path", ["/etc", "../context", "./context"])
async def test_a_dockerfile_names_no_directory_of_the_host(project: Project, path: str) -> None:
    for text in (
        f"FROM {path}",
        f"FROM base\nCOPY --from={path} . /x/",
        f"FROM base\nRUN --mount=from={path},target=/x y",
    ):
        with pytest.raises(DockerfileError, match="path of this machine"):
            await project.build_all(text)


@pytest.mark.parametrize("name", [".dockerignore", "Dockerfile.dockerignore"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
async def test_the_ignore_file_applies(project: Project, name: str, mark: str) -> None:
    project.write(a="1", b="2")
    (project.context / name).write_text(f"{mark}*\n!a\n")
    image = await project.build("COPY . /x/")
    assert {name for name in files_of(image) if name.startswith("x/")} == {"x/a"}


async def test_concurrent_builds_make_each_layer_once(project: Project) -> None:
    text = "FROM base\nRUN cat /proc/sys/kernel/random/uuid > /id\nRUN cat /id > /again\n"
    (project.context / "Dockerfile").write_text(text)
    events: list[BuildProgress] = []
    builds = [project.builder.build(project.context, on_progress=events.append) for _ in range(4)]
    found = await asyncio.gather(*builds)
    assert len(set(found)) == 1
    kinds = [event.kind for event in events]
    assert (kinds.count("made"), kinds.count("shared")) == (2, 6)


async def test_a_cancelled_build_leaves_nothing(project: Project) -> None:
    running = asyncio.Event()

    def started(event: BuildProgress) -> None:
        if event.kind == "step" and event.line == 2:
            running.set()

    (project.context / "Dockerfile").write_text("FROM base\nRUN sleep 1000\n")
    task = asyncio.create_task(project.builder.build(project.context, on_progress=started))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not project.store.root.exists() or project.incoming() == []


async def test_mounts_of_a_command(project: Project, tmp_path: Path) -> None:
    project.write(a="from the context")
    (tmp_path / "token").write_text("very secret\n")
    image = await project.build(
        "RUN --mount=type=secret,id=token --mount=type=secret,id=token,env=TOKEN "
        "--mount=type=bind,target=/src --mount=type=bind,source=a,target=/one "
        "--mount=type=cache,target=/cache --mount=type=tmpfs,target=/t "
        "--mount=type=bind,from=base,target=/base "
        "test \"$(cat /run/secrets/token)\" = 'very secret' && test \"$TOKEN\" = 'very secret' "
        "&& cat /src/a /one /base/etc/image > /got "
        "&& echo x > /cache/x && echo x > /t/x && echo x > /src/x\n",
        secrets={"token": tmp_path / "token"},
    )
    found = files_of(image)
    assert found["got"] == "from the contextfrom the contextfrom the image\n"
    left = {entry.split("/")[0] for entry in found} | {path.name for path in image.layers[1].iterdir()}
    assert not left & {"src", "one", "cache", "t", "base"}
    assert not (image.layers[1] / "run" / "secrets").exists()
    assert "very secret" not in "".join(found.values())
    assert [path.name for path in project.context.iterdir()].count("x") == 0


async def test_secrets_and_proxies_are_no_part_of_a_key(project: Project, tmp_path: Path) -> None:
    text = "RUN --mount=type=secret,id=s cat /run/secrets/s $none > /dev/null"
    (tmp_path / "s").write_text("1")
    first = await project.build(text, secrets={"s": tmp_path / "s"})
    (tmp_path / "s").write_text("2")
    second = await project.build(text, secrets={"s": tmp_path / "s"}, args={"http_proxy": "http://x"})
    assert (project.kinds(), second) == (["shared"], first)


def _archive(compress: str) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, content in {"d/x": b"1", "top": b"2"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("absolute")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(link)
    return lzma.compress(data.getvalue()) if compress == "xz" else data.getvalue()


@pytest.mark.parametrize("compress", ["", "xz"])
async def test_add_unpacks_archives_and_copy_does_not(project: Project, compress: str) -> None:
    (project.context / "a.tar").write_bytes(_archive(compress))
    image = await project.build("ADD a.tar /added/\nCOPY a.tar /copied/\nADD Dockerfile /plain/")
    layers = image.layers[1:]
    assert names(layers[0] / "added") == ["absolute", "d", "top"]
    assert names(layers[1] / "copied") == ["a.tar"]
    assert names(layers[2] / "plain") == ["Dockerfile"]


async def test_add_downloads_from_allowed_hosts_only(project: Project) -> None:
    async with web() as port:
        address = f"http://127.0.0.1:{port}/file.txt"
        with pytest.raises(DockerfileError, match="cannot download"):
            await project.build(f"ADD {address} /d/")
        project.builder.network = Network(allow=(f"127.0.0.1:{port}",))
        image = await project.build(f"ADD {address} /d/")
        assert files_of(image)["d/file.txt"] == "got GET /file.txt HTTP/1.1\n"
        with pytest.raises(DockerfileError, match="has the checksum"):
            await project.build(f"ADD --checksum=sha256:00 {address} /d/")


async def test_a_store_may_be_on_another_file_system(project: Project, driver: BubblewrapDriver) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        project.store = project.builder.store = LayerStore(Path(folder))
        image = await project.build(
            "RUN mkdir /d && echo 1 > /d/old && ln /d/old /d/same && rm /etc/image\n"
            "RUN rm -r /d && mkdir /d && echo 2 > /d/new"
        )
        found = files_of(image)
        await driver.aclose()  # it keeps leases of layers
    assert {name for name in found if name.startswith("d/")} == {"d/new"}
    assert "etc/image" not in found


async def test_a_name_that_is_not_unicode(project: Project) -> None:
    with tarfile.open(project.context / "\udcff.tar", "w"):
        pass
    await project.build("ADD *.tar /d/")


async def test_the_number_of_layers_is_limited(project: Project) -> None:
    text = "".join(f"WORKDIR /d{number}\n" for number in range(LAYER_LIMIT))
    with pytest.raises(DockerfileError, match="more than 120 layers"):
        await project.build(text)


async def test_the_network_is_part_of_the_request(project: Project) -> None:
    async with web() as port:
        project.builder.network = Network(allow=(f"127.0.0.1:{port}",))
        image = await project.build("RUN echo $http_proxy > /on\nRUN --network=none echo x$http_proxy > /off")
    found = files_of(image)
    assert found["on"].startswith("http://127.0.0.1:")
    assert found["off"] == "x\n"


async def test_a_layered_image_is_a_base(project: Project) -> None:
    await project.build("RUN echo 1 > /one\nENV a=b\nWORKDIR /w", name="mine")
    mine = project.store.root / "images" / "mine.layers.json"
    project.builder.puller = ImagePuller(project.store, PullSettings(bases={"mine:1": mine}))
    image = await project.build_all("FROM mine:1\nRUN cat /one > two")
    assert files_of(image)["w/two"] == "1\n"
    assert image.config.env == {"a": "b"}
