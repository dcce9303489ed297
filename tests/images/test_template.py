"""Templates: variables, sections, and copied files. No builder is needed."""

from pathlib import Path

import pytest

from prorl_envs.errors import InputError
from prorl_envs.images.definition import parse, render, substitute
from prorl_envs.images.template import ImageTemplate

HEAD = "Bootstrap: docker\nFrom: busybox\n"
TWO_STAGES = """\
# a comment
Bootstrap: docker
From: golang:1
Stage: build

%post
    echo Bootstrap: not here
    make

Bootstrap: localimage
From: base.sif

%files from build
    /made /opt/made
%post
    true
"""


def template(definition: str, folder: Path = Path(), **more: object) -> ImageTemplate:
    return ImageTemplate(name="t", version="1", definition=definition, folder=folder, **more)  # type: ignore[arg-type]


def test_stages_and_sections_are_parsed() -> None:
    first, second = parse(TWO_STAGES)
    assert first.header == {"bootstrap": "docker", "from": "golang:1", "stage": "build"}
    assert second.header == {"bootstrap": "localimage", "from": "base.sif"}
    assert [(s.name, s.arguments) for s in second.sections] == [("files", "from build"), ("post", "")]
    assert first.sections[0].lines == ["    echo Bootstrap: not here", "    make", ""]
    again = parse(render([first, second]))
    assert [stage.header for stage in again] == [first.header, second.header]


def test_lines_are_added_to_an_existing_section() -> None:
    (stage,) = parse(HEAD + "%labels\n    a 1\n")
    stage.add("labels", ["    b 2"])
    assert render([stage]).count("%labels") == 1
    assert "    a 1\n    b 2" in render([stage])


@pytest.mark.parametrize(
    ("definition", "says"),
    [
        ("", "definition is empty"),
        ("From: x\n", "not a line of a definition's header"),
        ("%post\n true\n", "does not start"),
        (HEAD + "%setup\n touch /tmp/host\n", "runs on the host"),
        (HEAD + "%SETUP\n touch /tmp/host\n", "runs on the host"),
        (HEAD + "%appfiles x\n /etc/shadow /x\n", "appfiles"),
        (HEAD + "x" * (1 << 20), "characters"),
    ],
)
def test_bad_definitions_are_refused(definition: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        template(definition).stages()


def test_variables_are_substituted() -> None:
    assert substitute("a {{ x }} {{y}} {{ x }}", {"x": "1", "y": "2"}) == "a 1 2 1"
    with pytest.raises(InputError, match="needs a value for y"):
        substitute("{{ x }} {{ y }}", {"x": "1"})
    with pytest.raises(InputError, match="does not use y"):
        substitute("{{ x }}", {"x": "1", "y": "2"})
    for value in ("a\n%setup", "a\r\nb", "a\u2028b", "a\0b"):
        with pytest.raises(InputError, match="one printable line"):
            substitute("{{ x }}", {"x": value})
    assert substitute("{{ x }}", {"x": "{{ y }}"}) == "{{ y }}"  # inserted text is not expanded again


@pytest.mark.parametrize(
    ("name", "version"), [("../a", "1"), ("A", "1"), ("a", ""), ("a", "1/2"), ("a" * 49, "1")]
)
def test_bad_names_are_refused(name: str, version: str) -> None:
    with pytest.raises(InputError, match=r"not a (name|version) of an image"):
        ImageTemplate(name=name, version=version, definition=HEAD)


def copied(definition: str, folder: Path, **more: object) -> dict[str, Path]:
    made = template(definition, folder, **more)
    return made.copied(made.stages())


def test_copied_files_come_from_the_definition_and_the_template(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).touch()
    found = copied(
        HEAD + "%files\n  a /opt/  # comment\n  b /opt/c\n", tmp_path, files={"/x": tmp_path / "a"}
    )
    assert found == {"/opt/a": tmp_path / "a", "/opt/c": tmp_path / "b", "/x": tmp_path / "a"}


def test_paths_that_leave_the_folder_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "secret").touch()
    (folder / "link").symlink_to("../secret")
    (folder / "up").symlink_to("..")
    for source in ("../secret", "link", "up/secret", "sub/../../secret"):
        with pytest.raises(InputError, match="leads out"):
            copied(HEAD + f"%files\n  {source} /opt/x\n", folder)
    with pytest.raises(InputError, match="no such file"):
        copied(HEAD + "%files\n  absent /opt/x\n", folder)


@pytest.mark.parametrize(
    "target", ["opt/x", "/opt/../../etc", "/", "/a b", "/a*", "/a\nb", "/a;b", "/$(x)", "/`x`", "/a\\b"]
)
def test_invalid_places_in_the_image_are_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(InputError, match="not a destination"):
        copied(HEAD, tmp_path, files={target: Path("a")})


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_byte_order_mark_before_a_definition_is_skipped(tmp_path: Path, mark: str) -> None:
    (tmp_path / "x.def").write_text(f"{mark}{HEAD}")
    assert ImageTemplate.read(tmp_path / "x.def").definition == HEAD


def test_a_dockerfile_is_no_definition(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile.gpu"
    path.write_text("FROM x\n")
    with pytest.raises(InputError, match="is a Dockerfile, not a definition") as raised:
        ImageTemplate.read(path)
    assert f"image build {tmp_path} --file {path}" in str(raised.value.hint)


def test_a_missing_or_binary_definition_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.def").write_bytes(b"\xff\xfe")
    for name in ("absent.def", "x.def"):
        with pytest.raises(InputError, match="cannot read"):
            ImageTemplate.read(tmp_path / name)
