"""The lines that are typed into a shell: bash where there is one, else `sh`. Pure.

A typed line makes the shell evaluate a command's text, which is quoted in that line or, if long or not
printable, lies in a memory file: a syntax error or an unclosed quote ends with the text. The line then has
the shell report. Both descriptors are closed for the command itself.
"""

from dataclasses import dataclass

#: Characters of the longest command typed into the terminal itself, whose lines hold 4,095 bytes (busybox
#: reads 1,023 at a time): the way through the file costs 25 microseconds more.
_TYPED_LIMIT = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One kind of shell.

    Args:
        name: what the model is told it is.
        options: the arguments it is started with.
        text_fd: its descriptor for a command's text. bash takes some itself, from 10 up and from 63
            down, and `ulimit -n` may be low; POSIX shells can redirect none above 9.
        report_fd: its descriptor for reports.
        quiet: what it says while it starts is dropped; `prepare` then gives it its output.
        prepare: typed first.
        evaluate: has places for what comes before (reading the text), for `$?`, and for the text.
        read: reads the text from the memory file.
        report: has a place for the nonce. What tracing says of these lines themselves goes into the pipe too,
            and is no report. `errexit` and tracing last for the command that sets them: a shell that keeps
            errexit would end at the next failing command.
        repair: undoes what can keep the lines above from working.
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
        """What to type so that the shell evaluates `command`, with `$?` as it was, and reports.

        Returns:
            The line, and what the memory file must hold where the line reads it.
        """
        # In a list with `&&`, so that neither errexit nor a trap on ERR take it for a failure.
        restore = f"(exit {status}) && :; " if status else ""
        report = self.report % nonce
        if len(command) <= _TYPED_LIMIT and command.isprintable():
            return (self.evaluate % ("", restore, _quote(command)) + report).encode(), None
        text = command + "\0" if self is BASH else f"__command={_quote(command)}\n"
        return (self.evaluate % (self.read, restore, '"$__command"') + report).encode(), text.encode()

    def ask(self, nonce: str) -> bytes:
        """What to type so that the shell, at its prompt, reports the last status."""
        return (self.report % nonce).encode()

    def ask_repaired(self, nonce: str) -> bytes:
        """The same, where the shell did not understand it."""
        return (self.repair + self.report % nonce).encode()


#: The empty line first makes the shell note which background jobs have ended while job control is off: then
#: it says nothing about them. Job control is on for the command alone, so that it has a process group of its
#: own to be signalled. History is off, so that no history file appears in the workspace; the environment of
#: children has no prompt. A command may have taken the shell's own input away; `builtin exec` would not
#: give it back for longer than its own line.
BASH = Dialect(
    name="bash",
    options=("--norc", "--noprofile", "--noediting", "-i"),
    text_fd=40,
    report_fd=41,
    quiet=False,
    prepare=(
        "\\builtin set +o history +H; \\builtin history -c; \\builtin unset HISTFILE; "
        "\\builtin export -n PS1 PS2\n"
    ),
    evaluate="\n%s\\builtin set -m; %s\\builtin eval %s 40<&- 41>&-; ",
    read="IFS= \\builtin read -rd '' -u 40 __command; ",
    report=(
        '{ \\builtin printf \'%%s %%s %%.4096s\\0\' %s "$?" "${PWD-}"; \\builtin set +exvm; '
        "[[ -t 0 ]] || \\exec 0</dev/tty; PS0= PS0= PS1= PS2= PROMPT_COMMAND=; } >&41 2>&1\n"
    ),
    # Functions hide builtins, but not the special ones where the rules of POSIX hold.
    repair=(
        "POSIXLY_CORRECT=1\n\\unset -f builtin enable eval exec printf set trap unalias unset\n"
        "\\unset POSIXLY_CORRECT\n\\enable builtin eval exec printf set trap unalias unset\n"
        "\\builtin trap - DEBUG\n\\builtin unalias { } [[ 2>&41\n"
    ),
)

#: Its lines come from its terminal as from a script: busybox would edit them, and ends at a signal meanwhile.
SH = Dialect(
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
