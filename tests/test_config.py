"""Settings: read from a file, overridden by environment variables, and refused with a hint if wrong."""

from pathlib import Path

import pytest

from prorl_envs.config import ServerSettings, load_settings
from prorl_envs.errors import InputError


def write(folder: Path, text: str) -> Path:
    path = folder / "settings.yaml"
    path.write_text(text)
    return path


def test_the_defaults_serve_on_loopback() -> None:
    settings = load_settings()
    assert settings.server.loopback
    assert settings.server.token is None


def test_environment_variables_override_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "service: {run: 8, init: 2}\nmodel: {servers: ['http://a']}\ncache_dir: ~/x\n")
    environ = {
        "PRORL_SERVICE__RUN": "64",
        "PRORL_MODEL__SERVERS": "[http://b, http://c]",
        "PRORL_SERVER__TOKEN": "0123456789012345",
        "PRORL_RUN_DIR": "/tmp/run",
        "HOME": "/root",
        "PATH": "/bin",
    }
    settings = load_settings(path, environ)
    assert (settings.service.run, settings.service.init) == (64, 2)
    assert settings.model.servers == ("http://b", "http://c")
    assert settings.server.token is not None
    assert settings.server.token.get_secret_value() == "0123456789012345", "digits stay text"
    assert settings.cache_dir == Path("~/x").expanduser()
    assert settings.run_dir == Path("/tmp/run")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RUN_DIR", "~x/y"),
        ("BWRAP", "~x/y"),
        ("IMAGES__LAYERS_DIR", "~x/y"),
        ("IMAGES__BASES", "{a: ~x/y}"),
        ("SERVICE__STORE", "~x/y"),
        ("SEARCH__CORPUS", "~x/y"),
    ],
)
def test_a_path_in_a_home_that_does_not_exist_is_refused(name: str, value: str) -> None:
    with pytest.raises(InputError, match="~x/y: ~x has no home directory") as caught:
        load_settings(None, {f"PRORL_{name}": value})
    assert "./~x" in caught.value.hint


def test_the_token_is_not_printed() -> None:
    settings = load_settings(None, {"PRORL_SERVER__TOKEN": "very-secret-token-here"})
    assert "very-secret" not in repr(settings)
    assert "very-secret" not in settings.model_dump_json()


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    assert load_settings(write(tmp_path, "")) == load_settings()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("service: {runn: 1}", "did you mean service.run?"),
        ("servce: {run: 1}", "did you mean service?"),
        ("service: {zzzzzz: 1}", "known: attempts"),
        ("service: {run: 0}", "service.run"),
        ("service: {run: many}", "service.run"),
        ("server: {token: short}", "server.token"),
        ("[1, 2]", "a mapping"),
        ("a: [", "not YAML"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        load_settings(write(tmp_path, text))
    assert says in str(caught.value)


def test_a_secret_is_not_quoted_by_the_error_that_refuses_it() -> None:
    with pytest.raises(InputError) as caught:
        load_settings(None, {"PRORL_SERVER__TOKEN": "tooshort"})
    assert "tooshort" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("PRORL_SERVICE__RUNS", "1", "did you mean service.run?"),
        ("PRORL_CACHE_DIR__X", "1", "cache_dir"),
        ("PRORL_SERVICE__RUN", "[", "not a YAML value"),
    ],
)
def test_a_wrong_environment_variable_is_named(name: str, value: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        load_settings(None, {name: value})
    assert says in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_settings(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
    ],
)
def test_loopback_hosts_are_recognised(host: str, loopback: bool) -> None:
    assert ServerSettings(host=host).loopback is loopback
