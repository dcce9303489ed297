"""The /etc of a sandbox, and the options that show the host's programs."""

from pathlib import Path

import pytest

from prorl_envs.sandbox.filesystem.host_system import kernel_masks, system_arguments, write_etc


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host's root with secrets in its /etc."""
    etc = tmp_path / "host" / "etc"
    (etc / "ssl" / "private").mkdir(parents=True)
    (etc / "ssl" / "certs").mkdir()
    (etc / "alternatives").mkdir()
    (etc / "shadow").write_text("root:secret")
    (etc / "passwd").write_text("alice:x:1000:1000::/home/alice:/bin/sh\n")
    (etc / "ssl" / "private" / "key").write_text("secret")
    (etc / "ssl" / "certs" / "authority.pem").write_text("certificate")
    (etc / "alternatives" / "awk").symlink_to("/usr/bin/mawk")
    (etc / "alternatives" / "awk.1.gz").symlink_to("/usr/share/man/man1/mawk.1.gz")
    (etc / "localtime").symlink_to(etc / "zone")
    (etc / "zone").write_text("TZif")
    (tmp_path / "host" / "lib64").symlink_to("usr/lib64")
    (tmp_path / "host" / "bin").mkdir()
    return tmp_path / "host"


def test_the_etc_holds_no_secret_and_no_user_of_the_host(host: Path, tmp_path: Path) -> None:
    target = tmp_path / "etc"
    write_etc(target, uid=1000, home="/home/agent", host=host / "etc")
    content = {path.relative_to(target).as_posix() for path in target.rglob("*")}
    assert "ssl/certs/authority.pem" in content
    assert not content & {"shadow", "ssl/private", "zone"}
    assert (target / "passwd").read_text().splitlines() == [
        "root:x:0:0:root:/root:/bin/bash",
        "agent:x:1000:1000:agent:/home/agent:/bin/bash",
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin",
    ]


def test_links_to_programs_stay_links(host: Path, tmp_path: Path) -> None:
    target = tmp_path / "etc"
    write_etc(target, uid=0, home="/home/agent", host=host / "etc")
    assert str((target / "alternatives" / "awk").readlink()) == "/usr/bin/mawk"
    assert [path.name for path in (target / "alternatives").iterdir()] == ["awk"], "no manual pages"
    assert (target / "localtime").read_text() == "TZif"
    assert (target / "passwd").read_text().startswith("root:x:0:0:root:/home/agent:")


def test_top_level_directories_match_the_host(host: Path) -> None:
    arguments = list(system_arguments(host))
    assert arguments[:3] == ["--ro-bind", str(host / "usr"), "/usr"]
    assert arguments[3:] == ["--ro-bind", str(host / "bin"), "/bin", "--symlink", "usr/lib64", "/lib64"]


def test_readable_kernel_files_are_hidden(tmp_path: Path) -> None:
    for name in ("keys", "slabinfo", "cpuinfo"):
        (tmp_path / name).touch()
    assert list(kernel_masks(tmp_path)) == [
        argument for name in ("keys", "slabinfo") for argument in ("--ro-bind", "/dev/null", f"/proc/{name}")
    ]
