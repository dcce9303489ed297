"""Text from a sandbox on an operator's screen: it must not control the terminal."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from prorl_envs.cli.commands import show
from prorl_envs.cli.output import console, progress, tables
from prorl_envs.errors import FailureKind, GraderError, InputError, printable
from prorl_envs.rollout.api.summary import summarise
from prorl_envs.rollout.api.types import (
    Failure,
    JobState,
    Result,
    Stage,
    StopReason,
    Timings,
)

#: Window titles, the clipboard, a typed-back answer, reversed writing, a bell, an 8-bit escape.
EVIL = "\x1b]0;x\x07\x1b]52;c;YQ==\x07\x1b[6n\x1b[2J\u202e\x07\x08\r\x9b31m\ud800\u2066"
HARMFUL = {c for c in EVIL if not c.isprintable()}


def result(failed: bool) -> Result:
    failure = Failure(kind=FailureKind.GRADER, stage=Stage.EVAL, message=EVIL, hint=EVIL)
    messages = [
        {"role": EVIL, "content": EVIL, "tool_calls": [{"function": {"name": EVIL, "arguments": EVIL}}]}
    ]
    return Result(
        job_id=EVIL, group_id=EVIL, sample=0, environment=EVIL, task_id=EVIL, trajectory=None,
        state=JobState.FAILED if failed else JobState.DONE, reward=None if failed else 1.0,
        mask_sample=failed, stop_reason=StopReason.FINISHED, timings=Timings(),
        failure=failure if failed else None,
        messages=messages, evidence={EVIL: EVIL},
    )  # fmt: skip


def followed() -> progress.Progress:
    shown = progress.Progress(1, 0)
    shown.add(result(failed=False))
    return shown


@pytest.mark.parametrize(
    "shown",
    [
        show.render(result(failed=True)),
        show.render(result(failed=False)),
        tables.samples_table([summarise(result(failed=True)), summarise(result(failed=False))]),
        tables.samples_table([replace(summarise(result(failed=True)), failure=EVIL, failed_in=EVIL)]),
        tables.samples_table(
            [replace(summarise(result(failed=False)), reward=None, state=EVIL, stop_reason=EVIL)]
        ),
        tables.tasks_table([summarise(result(failed=True))], 10),
        followed(),
        console.plain(EVIL),
    ],
    ids=[
        "failure",
        "episode",
        "samples",
        "failures of any kind",
        "ends of any kind",
        "tasks",
        "progress",
        "plain",
    ],
)
def test_output_of_the_commands_is_harmless(shown: RenderableType, tmp_path: Path) -> None:
    with (tmp_path / "screen").open("w", encoding="utf-8") as file:  # here a lone surrogate is an error
        Console(width=200, file=file, color_system=None).print(shown)
    text = (tmp_path / "screen").read_bytes().decode()
    assert "\\x1b]0;x" in text
    assert not HARMFUL & set(text) - {"\n"}


def test_errors_are_harmless_when_shown_and_logged(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    console.report(InputError(EVIL, hint=EVIL))
    logging.getLogger("attacks").warning("it failed: %s", GraderError(EVIL, hint=EVIL))
    for text in (capsys.readouterr().err, caplog.text):
        assert "\\x1b[2J" in text
        assert not HARMFUL & set(text) - {"\n"}


def test_ordinary_text_is_unchanged() -> None:
    assert printable("naïve ☃\tone\ntwo") == "naïve ☃\tone\ntwo"
