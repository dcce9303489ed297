"""Lines to type into a shell: bash if it exists, otherwise `sh`. Pure.

A typed line makes the shell evaluate a command's text, and then report. The text is quoted in the line or, if
it is long or not printable, stored in a memory file, so that a syntax error or an unclosed quote cannot
extend beyond the text. The descriptors of memory file and report are closed for the command itself.
"""

from dataclasses import dataclass

#: Maximum characters of a command that is typed into the terminal, whose lines hold 4,095 bytes (busybox
#: reads 1,023 at a time). Using the memory file costs 25 microseconds more.
_TYPED_LIMIT = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellSyntax:
    """Syntax and options of one kind of shell.

    Args:
        name: name of the shell, for the model.
        options: command-line arguments of the shell.
        text_fd: the shell's descriptor for a command's text. bash uses descriptors from 10 up and from 63
            down itself, and `ulimit -n` may be low; POSIX shells can redirect no descriptor above 9.
        report_fd: the shell's descriptor for reports.
        quiet: discard the shell's output during its start; `prepare` then connects its output.
        prepare: first line to type.
        evaluate: evaluates a text; placeholders: commands that read it, commands that restore `$?`, the text.
        read: reads the text from the memory file.
        report: reports; placeholder: the nonce. Trace output of these lines goes into the pipe too, and is
            not parsed as a report. `errexit`, tracing and DEBUG traps last only for the command that sets
            them: with errexit on, a shell would exit at the next failing command; the others show our lines.
        repair: undoes changes that can prevent the other lines from working.
    """

    name: str
    options: tuple[str, ...]
    text_fd: int
    report_fd: int
    quiet: bool
    prepare: str
    evaluate: str
    read: str
    report: str
    repair: str

    def line(self, command: str, *, nonce: str, status: int) -> tuple[bytes, bytes | None]:
        """Return the line that makes the shell evaluate `command`, with `$?` as before, and report.

        Returns:
            the line, and the content of the memory file if the line reads it.
        """
        # In a list with `&&`, so that neither errexit nor a trap on ERR treats it as a failure.
        restore = f"(exit {status}) && :; " if status else ""
        report = self.report % nonce
        if len(command) <= _TYPED_LIMIT and command.isprintable():
            return (self.evaluate % ("", restore, _quote(command)) + report).encode(), None
        text = command + "\0" if self is BASH else f"__command={_quote(command)}\n"
        return (self.evaluate % (self.read, restore, '"$__command"') + report).encode(), text.encode()

    def ask(self, nonce: str) -> bytes:
        """Return the line that makes the shell, at its prompt, report the last status."""
        return (self.report % nonce).encode()

    def ask_repaired(self, nonce: str) -> bytes:
        """Return the line of `ask` preceded by a repair, for a shell that did not report."""
        return (self.repair + self.report % nonce).encode()


#: The leading empty line makes the shell notice finished background jobs while job control is off, so that it
#: prints nothing about them. Job control is on only for the command, so that the command has its own process
#: group for signals. Aliases are also on only for the command, because an alias could replace `{` in these
#: lines. History is off, so that no history file appears in the workspace. The environment of children has no
#: prompt. A command may have redirected the shell's own input; `exec` restores it, which `builtin exec` would
#: do only for its own line.
BASH = ShellSyntax(
    name="bash",
    options=("--norc", "--noprofile", "--noediting", "-i"),
    text_fd=40,
    report_fd=41,
    quiet=False,
    prepare=(
        "\\builtin set +o history +H; \\builtin history -c; \\builtin unset HISTFILE; "
        "\\builtin export -n PS1 PS2; \\builtin shopt -u expand_aliases\n"
    ),
    evaluate="\n%s\\builtin set -m; \\builtin shopt -s expand_aliases; %s\\builtin eval %s 40<&- 41>&-; ",
    read="IFS= \\builtin read -rd '' -u 40 __command; ",
    report=(
        '{ \\builtin printf \'%%s %%s %%.4096s\\0\' %s "$?" "${PWD-}"; \\builtin trap - DEBUG; '
        "\\builtin set +exvm; \\builtin shopt -u expand_aliases; "
        "[[ -t 0 ]] || \\exec 0</dev/tty; PS0= PS0= PS1= PS2= PROMPT_COMMAND=; } >&41 2>&1\n"
    ),
    # Functions hide builtins, but in POSIX mode they do not hide special builtins.
    repair=(
        "POSIXLY_CORRECT=1\n\\unset -f builtin enable eval exec printf set trap unalias unset\n"
        "\\unset POSIXLY_CORRECT\n\\enable builtin eval exec printf set trap unalias unset\n"
        "\\builtin trap - DEBUG\n\\builtin unalias { } [[ 2>&41\n"
    ),
)

#: The shell reads its terminal as a script. Otherwise busybox would edit the lines, and exit at a signal.
SH = ShellSyntax(
    name="sh",
    options=("-i", "/dev/tty"),
    text_fd=8,
    report_fd=9,
    quiet=True,
    prepare="exec 1<&0 2<&0\n",
    evaluate="\n%s\\set -m; %s\\command eval %s 8<&- 9>&-; ",
    read="\\. /proc/self/fd/8; ",
    report=(
        '{ \\command printf \'%%s %%s %%.4096s\\0\' %s "$?" "${PWD-}"; \\set +exvm; PS1= PS2=; } >&9 2>&1\n'
    ),
    repair="\\unset -f command\n\\command unalias { } 2>&9\n",
)


def _quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
