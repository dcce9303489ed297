"""Comparison of two answers by `math-verify`, in a sandbox; imports none of our modules.

The library parses LaTeX with a grammar, and passes text that looks like arithmetic to sympy; a hostile answer
can make both take arbitrarily long. The library's own time limits are alarms, which do not stop a long step
in C: they are off, and the kernel enforces a limit of processor time instead. The address space is limited
likewise.
"""

import json
import logging
import resource
import sys

_CPU_S = 20
_MEMORY = 2 << 30


def main() -> None:
    from math_verify import parse, verify
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    logging.disable()
    given = json.load(sys.stdin)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + _CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    kinds = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    answer = parse(f"${given['answer']}$", kinds, parsing_timeout=None)
    for right in given["right"]:
        gold = parse(f"${right}$", kinds, parsing_timeout=None)
        if answer and gold and verify(gold, answer, timeout_seconds=None):
            sys.stdout.write("equal\n")
            return
    sys.stdout.write("other\n")


if __name__ == "__main__":
    main()
