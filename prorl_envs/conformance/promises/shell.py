"""Promises about the persistent shell that depend on the bash of the image."""

from prorl_envs.conformance.box import Probe
from prorl_envs.conformance.promise import Promises, expect, same

promises = Promises("bash")


def sequence(id_: str, text: str, *steps: tuple[str, str]) -> None:
    """Add a promise that the commands of a shell, run in order, print these texts."""

    @promises.shell(id_, text)
    async def _(box: Probe) -> None:
        for command, printed in steps:
            same((await box.bash(command)).text, printed)


sequence(
    "BASH-001",
    "Output is returned exactly as it was written.",
    (r"printf 'a\tb\n  c'", "a\tb\n  c"),
    ("echo a >&2; echo b", "a\nb\n"),
    ("", ""),
    ("# only", ""),
)


@promises.shell("BASH-010", "The status is returned, and kept for the next command.")
async def status(box: Probe) -> None:
    result = await box.bash("(exit 7)")
    same((result.ok, result.text, result.data["exit_code"]), (True, "[exit status 7]", 7))
    same((await box.bash("echo $?")).text, "7\n")


@promises.shell("BASH-012", "Text that is not a valid command gets an answer, and the next command works.")
async def syntax(box: Probe) -> None:
    for text in (
        'echo "never closed',
        "echo $(",
        "if true; then",
        "foo )",
        "cat <<'END",
        "for",
        "}",
        "'",
        "\\",
    ):
        expect((await box.bash(text)).data["timed_out"] is False, f"{text!r} was not over")
        same((await box.bash("echo fine")).text, "fine\n")


@promises.shell("BASH-013", "The exit of a shell is reported, and a new shell starts.")
async def exits(box: Probe) -> None:
    await box.bash("cd /tmp; x=1")
    result = await box.bash("exit 3")
    expect(
        result.data["exit_code"] == 3 and "exited with status 3" in result.text,
        f"it said {result.text!r}",
    )
    same((await box.bash("echo ${x-unset} $PWD")).text, "unset /tmp\n")


@promises.shell(
    "BASH-016",
    "At its deadline a command is interrupted; its output and the shell are kept.",
    needs=("bash", "sleep"),
)
async def deadline(box: Probe) -> None:
    await box.bash("x=kept")
    result = await box.bash("echo before; sleep 600; echo ending", timeout_s=1.0)
    same((result.ok, result.data["timed_out"], result.data["exit_code"]), (False, True, None))
    expect(result.text.startswith("before\n") and "ending" not in result.text, f"it printed {result.text!r}")
    same((await box.bash("echo $x")).text, "kept\n")


@promises.shell("BASH-019", "A command that waits for input is reported at once, and receives typed input.")
async def waits(box: Probe) -> None:
    result = await box.bash("read -p 'name? ' name", timeout_s=30.0)
    expect(result.text.startswith("name?") and result.data["waiting"], f"it gave {result.text!r}")
    refused = await box.bash("echo ${name:-empty}")
    expect(not refused.ok and "still waits" in refused.text, f"meanwhile it gave {refused.text!r}")
    await box.bash("Ada", is_input=True)
    same((await box.bash("echo $name")).text, "Ada\n")
