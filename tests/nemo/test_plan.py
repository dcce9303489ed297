"""What becomes of a request for a sandbox; without NeMo Gym and without a sandbox."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prorl_envs.errors import InputError
from prorl_envs.nemo.plan import PRIVATE, ProviderConfig, image_path, plan, provider_config
from prorl_envs.sandbox.base import Mount

NONE = {"cpu": None, "memory_mib": None, "disk_gib": None, "gpu": None, "gpu_type": None}


def asked(resources: dict[str, Any] | None = None, **given: Any) -> Any:
    """A request with the fields of NeMo Gym's."""
    empty = dict.fromkeys(("image", "ttl_s", "ready_timeout_s", "workdir", "entrypoint"))
    empty |= {"env": {}, "files": {}, "metadata": {}, "provider_options": {}}
    return SimpleNamespace(**{**empty, **given}, resources=SimpleNamespace(**{**NONE, **(resources or {})}))


def test_nothing_asked_for_is_the_hosts_system_and_an_empty_workspace() -> None:
    made = plan(asked(), ProviderConfig())
    assert (made.spec.workdir, made.workdir, made.make_workdir) == ("/workspace", "/workspace", False)
    assert (made.spec.uid, made.spec.mounts, made.ttl_s, made.warnings) == (0, (), None, ())


@pytest.mark.parametrize(
    ("image", "workdir", "place", "make"),
    [
        (None, "/app", "/app", False),
        (None, "/", "/workspace", False),
        (None, "/tmp/x", "/workspace", True),
        (None, "/home/agent", "/workspace", True),
        ("x.sif", "/testbed", PRIVATE, True),
        ("x.sif", "/", PRIVATE, False),
        ("x.sif", None, PRIVATE, False),
    ],
)
def test_an_images_own_directory_is_never_covered(
    image: str | None, workdir: str | None, place: str, make: bool
) -> None:
    made = plan(asked(image=image, workdir=workdir), ProviderConfig())
    assert (made.spec.workdir, made.workdir, made.make_workdir) == (place, workdir or place, make)


def test_options_of_the_sandbox_go_over_those_of_the_provider(tmp_path: Path) -> None:
    config = provider_config({"options": {"uid": 7, "hostname": "one", "binds": f"{tmp_path}:/a"}})
    made = plan(asked(provider_options={"hostname": "two"}), config).spec
    assert (made.uid, made.hostname) == (7, "two")
    assert made.mounts == (Mount(source=tmp_path, target="/a"),)


def test_limits_become_warnings_or_errors() -> None:
    request = asked({"cpu": 1.5, "disk_gib": 3})
    made = plan(request, ProviderConfig())
    assert made.warnings == (
        "a limit of 1.5 CPUs is not enforced",
        "a limit of 3 GiB of disk is not enforced",
    )
    with pytest.raises(InputError, match=r"1\.5 CPUs.*3 GiB"):
        plan(request, ProviderConfig(unenforced="error"))


@pytest.mark.parametrize(
    ("image", "path"),
    [
        (None, None),
        ("host", None),
        ("/images/a", Path("/images/a")),
        ("./a", Path("a")),
        ("a.sif", Path("a.sif")),
        ("file:///images/a", Path("/images/a")),
    ],
)
def test_an_image_is_the_host_a_directory_or_a_file(image: str | None, path: Path | None) -> None:
    assert image_path(image) == path


@pytest.mark.parametrize(
    "image", ["ubuntu", "org/name:tag", "docker://ubuntu", "oras://x/y.sif", "library://a"]
)
def test_other_images_are_refused_with_a_way(image: str) -> None:
    with pytest.raises(InputError, match="apptainer build"):
        image_path(image)


@pytest.mark.parametrize("bind", ["", "/x", "/x:", ":/x", "/:/x:rwx", "/no/such/place:/x"])
def test_a_wrong_bind_is_refused(bind: str) -> None:
    with pytest.raises(InputError, match="bind"):
        plan(asked(provider_options={"binds": [bind]}), ProviderConfig())


def test_ports_are_refused() -> None:
    with pytest.raises(InputError, match="8000"):
        plan(asked(ports=(8000,)), ProviderConfig())


@pytest.mark.parametrize(
    "config",
    [{"concurrency": 0}, {"default_timeout_s": float("inf")}, {"driver": "x"}, {"options": {"uid": -1}}],
)
def test_a_wrong_setting_is_named(config: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(config))):
        provider_config(config)
