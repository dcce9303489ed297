"""Translation of sandbox requests, without NeMo Gym and without a sandbox."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prorl_envs.errors import InputError
from prorl_envs.images.sources import Source, SourceKind
from prorl_envs.images.template import ImageTemplate
from prorl_envs.nemo.images import image_source
from prorl_envs.nemo.plan import PRIVATE, Plan, ProviderConfig, provider_config, unenforced
from prorl_envs.nemo.plan import plan as plan_within
from prorl_envs.sandbox.base import Mount, Network, SandboxLimits

NONE = {"cpu": None, "memory_mib": None, "disk_gib": None, "gpu": None, "gpu_type": None}


def asked(resources: dict[str, Any] | None = None, **given: Any) -> Any:
    """Return a request with the fields of NeMo Gym's."""
    empty = dict.fromkeys(("image", "ttl_s", "ready_timeout_s", "workdir", "entrypoint"))
    empty |= {"env": {}, "files": {}, "metadata": {}, "provider_options": {}}
    return SimpleNamespace(**{**empty, **given}, resources=SimpleNamespace(**{**NONE, **(resources or {})}))


def plan(asked: Any, config: ProviderConfig, limits: SandboxLimits | None = None, **known: Any) -> Plan:
    return plan_within(asked, config, limits or SandboxLimits(), **known)


def test_an_empty_request_is_the_hosts_system_and_an_empty_workspace() -> None:
    made = plan(asked(), ProviderConfig())
    assert (made.spec.workdir, made.workdir, made.make_workdir) == ("/workspace", "/workspace", False)
    assert (made.spec.uid, made.spec.mounts, made.ttl_s, made.asked) == (0, (), None, {})
    assert made.spec.limits == SandboxLimits()


@pytest.mark.parametrize(
    ("image", "workdir", "place", "make"),
    [
        (None, "/app", "/app", False),
        (None, "/", "/workspace", False),
        (None, "/tmp/x", "/workspace", True),
        (None, "/home/agent", "/workspace", True),
        ("x:1", "/testbed", PRIVATE, True),
        ("x:1", "/", PRIVATE, False),
        ("x:1", None, PRIVATE, False),
    ],
)
def test_an_images_own_directory_is_never_covered(
    image: str | None, workdir: str | None, place: str, make: bool
) -> None:
    made = plan(asked(image=image, workdir=workdir), ProviderConfig())
    assert (made.spec.workdir, made.workdir, made.make_workdir) == (place, workdir or place, make)


def test_options_of_the_sandbox_override_those_of_the_provider(tmp_path: Path) -> None:
    config = provider_config({"options": {"uid": 7, "hostname": "one", "binds": f"{tmp_path}:/a"}})
    made = plan(asked(provider_options={"hostname": "two"}), config).spec
    assert (made.uid, made.hostname) == (7, "two")
    assert made.mounts == (Mount(source=tmp_path, target="/a"),)


def test_resources_override_the_limits_of_the_machine() -> None:
    machine = SandboxLimits(memory_bytes=1 << 30, processes=77)
    made = plan(asked({"cpu": 1.5, "memory_mib": 512, "disk_gib": 3}), ProviderConfig(), machine)
    assert made.spec.limits == SandboxLimits(
        memory_bytes=512 << 20, processes=77, cpus=1.5, disk_bytes=3 << 30
    )
    assert made.asked == {
        "cpus": "1.5 CPUs",
        "memory_bytes": "512 MiB of memory",
        "disk_bytes": "3 GiB of disk",
    }


def test_unenforced_limits_become_warnings_or_errors() -> None:
    made = plan(asked({"cpu": 1.5, "memory_mib": 512}), ProviderConfig())
    assert unenforced(made.asked, {"memory_bytes"}, ProviderConfig()) == (
        "a limit of 1.5 CPUs is not enforced here",
    )
    assert unenforced(made.asked, {"memory_bytes", "cpus"}, ProviderConfig(unenforced="error")) == ()
    with pytest.raises(InputError, match=r"1\.5 CPUs"):
        unenforced(made.asked, {"memory_bytes"}, ProviderConfig(unenforced="error"))


@pytest.mark.parametrize(
    ("image", "address"),
    [
        ("python:3.12", "docker://python:3.12"),
        ("org/name", "docker://org/name"),
        ("host.example:5000/a/b:c", "docker://host.example:5000/a/b:c"),
        ("tar", "docker://tar"),
        ("docker://ubuntu", "docker://ubuntu"),
        ("oras://x/y.sif", "oras://x/y.sif"),
        ("library://a", "library://a"),
    ],
)
def test_a_name_is_an_image_of_a_registry(image: str, address: str) -> None:
    assert image_source(image, {}) == Source(SourceKind.REMOTE, address)


def test_an_image_is_the_host_or_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Source(SourceKind.DIRECTORY, str(tmp_path))
    for name in (None, "", "host"):
        assert image_source(name, {}) == Source(SourceKind.HOST)
    for name in (str(tmp_path), f"file://{tmp_path}", f"dir:{tmp_path}"):
        assert image_source(name, {}) == folder
    monkeypatch.chdir(tmp_path.parent)
    assert image_source(f"./{tmp_path.name}", {}) == folder


def test_a_definition_takes_its_variables(tmp_path: Path) -> None:
    path = tmp_path / "task.def"
    path.write_text("Bootstrap: docker\nFrom: {{ base }}\n")
    made = plan(
        asked(image=str(path), provider_options={"image_variables": {"base": "x"}}), ProviderConfig()
    ).image
    assert isinstance(made, ImageTemplate)
    assert (made.name, dict(made.variables), made.folder) == ("task", {"base": "x"}, tmp_path)


@pytest.mark.parametrize("image", ["a.sif", "./no/such", "/no/such.def", "x://y", "docker://a b", "a b"])
def test_an_invalid_image_is_refused(image: str) -> None:
    with pytest.raises(InputError):
        image_source(image, {})
    with pytest.raises(InputError, match="image_variables"):
        image_source("ubuntu", {"a": "b"})


@pytest.mark.parametrize("bind", ["", "/x", "/x:", ":/x", "/:/x:rwx", "/no/such/place:/x"])
def test_a_wrong_bind_is_refused(bind: str) -> None:
    with pytest.raises(InputError, match="bind"):
        plan(asked(provider_options={"binds": [bind]}), ProviderConfig())


@pytest.mark.parametrize(
    ("url", "reached", "allowed"),
    [
        ("http://127.0.0.1:8000/v1", "127.0.0.1:8000", ()),
        ("http://localhost", "127.0.0.1:80", ()),
        ("https://0.0.0.0:1", "127.0.0.1:1", ()),
        ("http://127.0.1.1:8000", "127.0.1.1:8000", ()),
        ("http://10.0.0.5:8000", "", ("10.0.0.5:8000",)),
        ("https://model.example/v1", "", ("private:model.example:443",)),
        ("http://[fd00::1]:8000/", "", ("[fd00::1]:8000",)),
    ],
)
def test_a_server_is_reached_on_the_loopback_or_through_the_proxy(
    url: str, reached: str, allowed: tuple[str, ...]
) -> None:
    request = asked(provider_options={"servers": ["model", "model"], "allow": "pypi.org"})
    made = plan(request, ProviderConfig(), find={"model": url}.__getitem__)
    assert [str(server) for server in made.servers] == [reached] * bool(reached)
    assert made.spec.network == Network(allow=("pypi.org", *allowed))


@pytest.mark.parametrize(
    "url", ["model", "", "http://", "ftp://x", "http://a@b", "http://[::1]:1", "http://x:99999"]
)
def test_a_wrong_server_is_refused(url: str) -> None:
    with pytest.raises(InputError, match="not a server"):
        plan(asked(provider_options={"servers": url}), ProviderConfig())


def test_nothing_is_reached_by_default_and_a_harness_inside_must_say_so() -> None:
    assert plan(asked(), ProviderConfig()).spec.network == Network()
    with pytest.raises(InputError, match="opencode"):
        plan(asked(), ProviderConfig(), harness="opencode")
    made = plan(asked(provider_options={"servers": []}), ProviderConfig(), harness="opencode")
    assert made.spec.network == Network()


@pytest.mark.parametrize(
    "config",
    [{"concurrency": 0}, {"default_timeout_s": float("inf")}, {"driver": "x"}, {"options": {"uid": -1}}],
)
def test_a_wrong_setting_is_named(config: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(config))):
        provider_config(config)
