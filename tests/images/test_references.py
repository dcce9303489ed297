"""References of images, and the logins for their registries."""

import base64
import json
from pathlib import Path

import pytest

from prorl_envs.errors import InputError
from prorl_envs.images.registry.client import RegistryEndpoint, RegistrySettings, endpoints_of
from prorl_envs.images.registry.credentials import RegistryLogin, find_login
from prorl_envs.images.registry.puller import find_base
from prorl_envs.images.registry.reference import ImageReference, parse_reference

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ubuntu", ("docker.io", "library/ubuntu", "latest", "")),
        ("docker://ubuntu:24.04", ("docker.io", "library/ubuntu", "24.04", "")),
        ("index.docker.io/ubuntu", ("docker.io", "library/ubuntu", "latest", "")),
        ("team/app:1", ("docker.io", "team/app", "1", "")),
        ("quay.io/team/app", ("quay.io", "team/app", "latest", "")),
        ("localhost/app:x", ("localhost", "app", "x", "")),
        ("localhost:5000/app", ("localhost:5000", "app", "latest", "")),
        ("[::1]:5000/a/b/c:2", ("[::1]:5000", "a/b/c", "2", "")),
        (f"quay.io/app@{DIGEST}", ("quay.io", "app", "", DIGEST)),
        (f"quay.io/app:1@{DIGEST}", ("quay.io", "app", "1", DIGEST)),
    ],
)
def test_references(text: str, expected: tuple[str, ...]) -> None:
    reference = parse_reference(text)
    assert reference == ImageReference(*expected)
    assert parse_reference(str(reference)) == reference
    assert reference.version == (expected[3] or expected[2])


@pytest.mark.parametrize(
    "text",
    [
        "", "docker://", "Upper", "a//b", "a/../b", "quay.io/a/..", "a:", "a:b:c", "a:ta g", "a@",
        "a@sha256:1",
        "a@md5:" + "a" * 32, "user@host/a", "quay.io:port/a", "http://quay.io/a", "a\n", "-a/b", "quay.io/",
        "a" * 2000,
    ],
)  # fmt: skip
def test_wrong_references(text: str) -> None:
    with pytest.raises(InputError):
        parse_reference(text)


def test_endpoints() -> None:
    settings = RegistrySettings(
        mirrors={"docker.io": ("mirror:5000", "cache.example/hub/")}, insecure=("mirror:5000",)
    )
    found = endpoints_of(parse_reference("ubuntu"), settings)
    assert found == [
        RegistryEndpoint("mirror:5000", "library/ubuntu", insecure=True),
        RegistryEndpoint("cache.example", "hub/library/ubuntu"),
        RegistryEndpoint("docker.io", "library/ubuntu"),
    ]
    assert [one.url for one in found] == [
        "http://mirror:5000/v2/library/ubuntu",
        "https://cache.example/v2/hub/library/ubuntu",
        "https://registry-1.docker.io/v2/library/ubuntu",
    ]


def test_base_aliases() -> None:
    bases = {"ubuntu:24.04": Path("/base"), "quay.io/a": Path("/a")}
    assert find_base("docker.io/library/ubuntu:24.04", bases) == Path("/base")
    assert find_base("docker://quay.io/a:latest", bases) == Path("/a")
    assert find_base("ubuntu:22.04", bases) is None


def encoded(user: str, password: str) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


def test_logins_by_registry_and_path(tmp_path: Path) -> None:
    logins = {
        "quay.io": encoded("all", "1:2"), "quay.io/team": encoded("team", "2"),
        "https://index.docker.io/v1/": encoded("hub", "3"),
        "token.example": {**encoded("<token>", ""), "identitytoken": "refresh"},
        "broken": {"auth": "%%%"}, "wrong": 3,
    }  # fmt: skip
    (tmp_path / ".docker").mkdir()
    (tmp_path / ".docker" / "config.json").write_text(json.dumps({"auths": logins}))
    home = {"HOME": str(tmp_path)}
    assert find_login("quay.io", "x/y", home) == RegistryLogin("all", "1:2")
    assert find_login("quay.io", "team/y", home) == RegistryLogin("team", "2")
    assert find_login("quay.io", "teamwork", home) == RegistryLogin("all", "1:2")
    assert find_login("docker.io", "library/ubuntu", home) == RegistryLogin("hub", "3")
    assert find_login("token.example", "a", home) == RegistryLogin("<token>", "", "refresh")
    for registry in ("other", "broken", "wrong"):
        assert find_login(registry, "a", home) is None


def test_files_of_logins_in_their_order(tmp_path: Path) -> None:
    for number, name in enumerate(("docker/config.json", "run/containers/auth.json", "named.json")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"auths": {"r": encoded(name, str(number))}}))
    environ = {"DOCKER_CONFIG": str(tmp_path / "docker")}
    assert find_login("r", "a", environ) == RegistryLogin("docker/config.json", "0")
    environ["XDG_RUNTIME_DIR"] = str(tmp_path / "run")
    assert find_login("r", "a", environ) == RegistryLogin("run/containers/auth.json", "1")
    environ["REGISTRY_AUTH_FILE"] = str(tmp_path / "named.json")
    assert find_login("r", "a", environ) == RegistryLogin("named.json", "2")
    environ |= {"APPTAINER_DOCKER_USERNAME": "user", "APPTAINER_DOCKER_PASSWORD": "word"}
    assert find_login("r", "a", environ) == RegistryLogin("user", "word")
    assert "word" not in repr(find_login("r", "a", environ))


def test_a_file_of_logins_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read the registry logins"):
        find_login("r", "a", {"REGISTRY_AUTH_FILE": str(tmp_path / "absent")})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot read the registry logins"):
        find_login("r", "a", {"DOCKER_CONFIG": str(tmp_path)})
