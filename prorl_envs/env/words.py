"""Extraction of answers from model output: a box, or a line `Answer: ...`. Pure and bounded."""

import itertools
import re

_THOUGHT_ENDS = "</think>"
_THOUGHT = "<think>"
#: The start of a box; or a box without braces that ends its formula or line, as in `$\boxed 42$`.
_BOX = re.compile(
    r"\\(?:boxed|fbox)(?:\s*\{|\s?(?P<bare>[-+]?\d[\d,]{0,40}(?:\.\d+)?(?:/\d+)?|(?<=\s)[A-Z]"
    r"|\\[dt]?frac\s*(?:\d|\{[^{}]{1,100}\})\s*(?:\d|\{[^{}]{1,100}\}))(?=[.,!]?\s*(?:\$|\\[)\]]|\n|\Z)))"
)
#: The text between two boxes that are one answer: spaces, marks of formulas and emphasis, a comma, a word.
_JOINT = re.compile(
    r"(?:[\s$~*,;]|\\[,;:! ()\[\]]|\\q?quad\b|\b(?:and|or)\b"
    r"|\\(?:text|mathrm|mbox)\s*\{\s*,?\s*(?:and|or)\s*\})*+"
)
_OR, _COMMA = re.compile(r"\bor\b"), re.compile(r"(?<!\\)[,;]|\band\b")
_SO = "(?:so|thus|hence|then|therefore)"
_LEAD = rf"(?:{_SO}\b\W*)?(?:(?:the|my|our|final|correct|right)\s+)*"
#: `ans` begins with a capital: in code, it is often the name of a variable.
_LABEL = re.compile(
    rf"^\W*{_LEAD}(?:answer|(?-i:Ans|ANS)|(?<=correct )(?:option|choice))\b\s*(?:\([^()]*\)\s*)?"
    rf"(?:is\b\s*(?:{_SO}\b\s*)?)?(?P<colon>[:：→]|[-=]>|=|(?<=ans)\.:?)?\s*",
    re.IGNORECASE,
)
#: Answers as some models are trained to state them, after GSM8K (`#### 42`) and DeepSeek R1.
_TAGGED = re.compile(r"<answer>(.{1,500}?)</answer>", re.DOTALL | re.IGNORECASE)
#: The end of a line is no heading, so `It is 42. #### 42` is an answer too.
_MARKED = re.compile(r"(?:^|\s)####\s*+([-+−]?\$?\d[\d,]*+(?:\.\d++)?)\s*+%?\s*+$")
_REASON = re.compile(r"(?<=\S)(?:,?\s+(?:since|because)|,\s+which)\b.*", re.IGNORECASE)
#: Characters that a JSON text has for commands such as `\frac`, `\beta` and `\times`, if a model or a data
#: file does not escape the backslash.
_CONSUMED = re.compile(
    r"[\b\f]|\t(?=(?:ext|imes|heta|an|au|riangle)(?![a-z])|frac)|\r(?=ight|ho(?![a-z])|angle)"
    r"|\n(?=eq(?![a-z])|abla)"
)
_ESCAPES = {"\b": r"\b", "\f": r"\f", "\t": r"\t", "\r": r"\r", "\n": r"\n"}
#: The mark of a list's item. The answer `- 73` on the line after `Answer:` is no negative number.
_ITEM = re.compile(r"(?:[-*+•]|\d{1,2}[.)])\s+(?=\S)")
#: The end of an answer in the format of Minerva (https://arxiv.org/abs/2206.14858, listing 1).
_HOPE = re.compile(r"\.?\s*I hope it is correct\.?\s*$")
_IS = re.compile(rf"\bis\s*(?:{_SO}\s*)?$", re.IGNORECASE)
#: The start of a text, or of a sentence in it.
_SENTENCE = re.compile(
    r"^|(?<=[.!?:;])\s+|(?<=[.!?:;][\"'”’)\]*])\s+|\s+(?=The (?:final |correct )?answer is\b)"
    r"|(?:Based on|According to|Given|From|Using|Considering)\b[^.!?:;]{1,200}?,\s+"
)
_HEADING = re.compile(r"\s*(?:#+\s|\*\*|__)")
_DISPLAY = re.compile(r"\s*(?:\$\$(.{1,500}?)\$\$|\\\[(.{1,500}?)\\\]|```\w*\n)", re.DOTALL)
_WORD = re.compile(r"(?<![\\{A-Za-z])[A-Za-z]{3,}")
_FORMULAS = ("$", "\\(", "\\[")
#: Lines searched for statements, from the end of a text; and characters of each, from its end.
_LINES, _LINE_CHARS = 20, 500
#: Emphasis and code spans of Markdown. An opening mark never follows a word or bracket, and a closing mark
#: never precedes one. So the `**` of `x**2 + (y)**2` are no marks.
_EMPHASIS = re.compile(
    r"(?<![\w)\]}*`\\])(\*{1,3}|_{1,3}|`{1,3})(?=\S)(.{1,500}?)(?<=\S)(?:\1(?![\w({\[*`])|(?<=[:：])(?:\1|\s+\1(?=\s)))",
    re.DOTALL,
)
_INSIDE = r"(?:[^$\\]|\\[^()\[\]])"
_FORMULA = re.compile(rf"({_INSIDE}*)(?:\$\$?|\\[(\[])({_INSIDE}+)(?:\$\$?|\\[)\]])({_INSIDE}*)", re.DOTALL)
#: Maximum characters searched, from the end of a text.
MAX_CHARS = 200_000


def said(text: str) -> str:
    """Return the model's text after its reasoning; "" if the reasoning is not closed."""
    _, marker, rest = text[-MAX_CHARS:].rpartition(_THOUGHT_ENDS)
    if marker:
        return rest
    return "" if _THOUGHT in text else text[-MAX_CHARS:]


def last_boxed(text: str) -> str:
    r"""Return the content of the last `\boxed{...}` with balanced braces or `\boxed 42`, else "".

    Boxes with nothing but a comma, `and` or `or` between them are one answer: `1, 2` of
    `\boxed{1} and \boxed{2}`.
    """
    spoken = said(text)
    contents: list[str] = []
    following = len(spoken)
    for box in reversed(list(_BOX.finditer(spoken))):
        end = box.end() - 1 if box["bare"] else _brace_end(spoken, box.end())
        link = _link(spoken[end + 1 : following])
        if end < 0 or (contents and not link):
            break
        content = box["bare"] or spoken[box.end() : end].strip()
        if [content] != contents[:1]:
            contents[:0] = [content, link] if contents else [content]
        following = box.start()
    return "".join(contents)


def _link(between: str) -> str:
    """Return the words that join the boxes before and after a text; "" if other words are in it."""
    if len(between) > _LINE_CHARS or not _JOINT.fullmatch(between):
        return ""
    return " or " if _OR.search(between) else ", " if _COMMA.search(between) else ""


def stated(words: str) -> str:
    """Return the answer that a last message states: its last boxed expression or line `Answer: ...`.

    `#### 42` and `<answer>42</answer>` are such lines, too. The later statement counts, unless the line is
    prose that repeats the boxed expression. The answer may be on the line after `**Answer:**`. A sentence
    `The answer is ...` counts if it is short, or if nothing else states an answer.
    """
    spoken = said(words).rstrip()
    box, boxed = max((match.start() for match in _BOX.finditer(spoken)), default=-1), last_boxed(words)
    tagged = [(match.start(), match[1].strip(), True) for match in _TAGGED.finditer(spoken)]
    found = sorted([*_statements(spoken), *tagged])
    certain = [(at, text) for at, text, sure in found if sure]
    if certain and (not boxed or (certain[-1][0] > box and not _repeats(certain[-1][1], boxed))):
        return certain[-1][1]
    return boxed or (found[-1][1] if found else "")


def with_backslashes(text: str) -> str:
    r"""Restore the backslashes of commands that JSON took for escapes: `\frac`, written as `"\frac"`."""
    return _CONSUMED.sub(lambda match: _ESCAPES[match[0]], text)


def bare(answer: str) -> str:
    """Strip the decoration of an answer: a box, a label `Answer:`, emphasis, backquotes, the dollar signs of
    its only formula, a full stop."""
    answer = with_backslashes(answer)
    text = _without_stop((last_boxed(answer) or answer).strip())
    for _ in range(3):
        text = _without_stop(_undecorated(text).strip())
        if (label := _LABEL.match(text)) and (label["colon"] or text.startswith(_FORMULAS, label.end())):
            text = text[label.end() :] or text
        if formula := _FORMULA.fullmatch(text):
            text = _without_stop(" ".join(part.strip() for part in formula.groups()).strip())
    return text


def _statements(spoken: str) -> list[tuple[int, str, bool]]:
    """Return the last lines that state an answer: the position, the answer, and whether it is surely one."""
    lines = spoken.split("\n")
    at = sum(len(line) + 1 for line in lines[:-_LINES])
    found = []
    for index in range(max(len(lines) - _LINES, 0), len(lines)):
        if marked := _MARKED.search(lines[index]):
            found.append((at + marked.start(), marked[1], True))
        line = lines[index][-_LINE_CHARS:]
        at += len(lines[index]) - len(line)
        below = "\n".join(lines[index + 1 :])[: 2 * _LINE_CHARS]
        text = _undecorated(line.strip())
        text = text[item.end() :] if (item := _ITEM.match(text)) else text
        starts = [match.end() for match in _SENTENCE.finditer(text) if _LABEL.match(text[match.end() :])]
        for start, end in itertools.pairwise([*starts, len(text)]):
            label = _LABEL.match(text[start:end])
            if label is None:
                continue
            rest = _REASON.sub("", _HOPE.sub("", text[start + label.end() : end])).strip()
            has_verb = _IS.search(label[0]) is not None or rest.startswith(_FORMULAS)
            if (label["colon"] or has_verb or (not rest and _HEADING.match(line))) and (
                rest or end == len(text)
            ):
                answer = _first(f"{rest}\n{below}")
                sure = bool(label["colon"] or not _WORD.search(rest) or _decorated(line, rest))
                found += [(at + start, answer, sure)] if answer else []
        at += len(line) + 1
    return found


def _first(text: str) -> str:
    """Return the first formula or line of a text."""
    display = _DISPLAY.match(text)
    if display and (formula := display[1] or display[2]):
        return formula.strip()
    lines = text[display.end() if display else 0 :].strip().split("\n")
    answer = _undecorated(lines[0].strip()) if len(lines[0]) <= _LINE_CHARS else ""
    answer = answer.removeprefix("**").removesuffix("**").strip()
    return answer[item.end() :] if (item := _ITEM.match(answer)) else answer


def _decorated(line: str, rest: str) -> bool:
    """Return true if the whole rest of a line is emphasised, or is one formula."""
    text = _without_stop(rest.strip())
    emphasised = any(f"{mark}{text}" in line for mark in "*`_")
    return emphasised or (text.startswith(_FORMULAS) and text.endswith(("$", "\\)", "\\]")))


def _repeats(text: str, boxed: str) -> bool:
    """Return true if a text is prose that contains the boxed expression."""
    return len(_WORD.findall(text)) >= 3 and re.search(rf"(?<!\w){re.escape(boxed)}(?!\w)", text) is not None


def _undecorated(text: str) -> str:
    for marks in ("***", "**", "___", "__"):  # some models write a space inside the marks
        inner = _without_stop(text).removeprefix(marks).removesuffix(marks)
        if len(inner) == len(_without_stop(text)) - 2 * len(marks) and marks not in inner:
            text = inner.strip()
    for _ in range(3):  # emphasis may be nested
        text, count = _EMPHASIS.subn(r"\2", text)
        if not count:
            break
    return text


def _without_stop(text: str) -> str:
    return text[:-1].rstrip() if text.endswith(".") and not text.endswith("..") else text


def _brace_end(text: str, start: int) -> int:
    """Return the position of the brace that closes the one before `start`; -1 if there is none."""
    depth, at = 1, start
    while at < len(text):
        if text[at] == "\\":
            at += 1  # an escaped brace does not count
        elif text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
            if depth == 0:
                return at
        at += 1
    return -1
