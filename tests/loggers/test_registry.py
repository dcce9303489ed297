"""Names and options of loggers, and loggers of other packages."""

import subprocess
import sys
from pathlib import Path

import pytest

from prorl_envs.errors import InputError
from prorl_envs.extras import install_extras
from prorl_envs.loggers.registry import logger_of

#: Package of another author, complete except for the installation: its metadata is beside it.
LAB = """
class LabLogger:
    def __init__(self, options):
        self.path = options["file"]

    def start(self, run):
        print("started", run.name)

    def log(self, metrics, step):
        pass

    def finish(self, summary):
        pass
"""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nonsense", "no logger is called 'nonsense'"),
        ("tensorboard:dir", "'dir' is not an option"),
        ("tensorboard:folder=x", "unknown option 'folder'"),
        ("tensorboard:=x", "'=x' is not an option"),
    ],
)
def test_wrong_names_and_options_are_input_errors(text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem) as raised:
        logger_of(text)
    assert raised.value.hint


def test_options_may_contain_colons_and_equals_signs() -> None:
    from prorl_envs.loggers.registry import _options

    assert _options("x", "a=sqlite:///x.db?b=c,d=") == {"a": "sqlite:///x.db?b=c", "d": ""}


@pytest.mark.parametrize(
    ("name", "package"), [("wandb", "wandb"), ("mlflow", "mlflow"), ("tensorboard", "tensorboardX")]
)
def test_a_missing_package_gives_a_hint(name: str, package: str) -> None:
    program = f"""
import sys
sys.modules[{package!r}] = None
from prorl_envs.errors import InputError
from prorl_envs.loggers.registry import logger_of
try:
    logger_of({name!r})
except InputError as error:
    print(error.hint)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{install_extras(name)}\n"


def test_another_package_provides_a_logger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lab_logger.py").write_text(LAB)
    metadata = tmp_path / "lab_logger-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-logger\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[prorl_envs.loggers]\nlab = lab_logger:LabLogger\n")
    monkeypatch.syspath_prepend(tmp_path)
    name, logger = logger_of("lab:file=x.txt")
    assert name == "lab" and getattr(logger, "path") == "x.txt"  # noqa: B009
