"""Findings of an audit: what is wrong with a task, how severe it is, and how to see it again."""

from dataclasses import dataclass, field
from enum import StrEnum

from prorl_envs.tools.types import JsonObject


class Severity(StrEnum):
    """Consequence for training: an error makes rewards wrong, a warning may; a note is for the author."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class FindingKind(StrEnum):
    """Kind of a finding; `MEANING` has a sentence for each."""

    BROKEN = "broken"
    UNSOLVABLE = "unsolvable"
    NO_REFERENCE = "no_reference"
    REFUSED_CALL = "refused_call"
    VACUOUS = "vacuous"
    GUESSABLE = "guessable"
    GUESSABLE_SET = "guessable_set"
    REMOVABLE_TESTS = "removable_tests"
    SKIP_AS_PASS = "skip_as_pass"
    SHADOWED_TESTS = "shadowed_tests"
    PLANTED_REWARD = "planted_reward"
    LEAK = "leak"
    FLAKY = "flaky"
    TIMEOUT_EDGE = "timeout_edge"
    HIDDEN_NETWORK = "hidden_network"
    CONTRADICTION = "contradiction"
    DUPLICATE = "duplicate"
    MISSING_FILE = "missing_file"
    OUTSIDE_FILES = "outside_files"


#: Severity and meaning of each kind.
MEANING = {
    FindingKind.BROKEN: (Severity.ERROR, "an episode of the task fails"),
    FindingKind.UNSOLVABLE: (Severity.ERROR, "the reference does not score 1"),
    FindingKind.NO_REFERENCE: (Severity.WARNING, "nothing shows that the task can be solved"),
    FindingKind.REFUSED_CALL: (Severity.ERROR, "a call of the reference is refused"),
    FindingKind.VACUOUS: (Severity.ERROR, "the untouched workspace scores above 0"),
    FindingKind.GUESSABLE: (Severity.ERROR, "an empty or senseless answer scores above 0"),
    FindingKind.GUESSABLE_SET: (Severity.WARNING, "one answer, always given, solves most tasks of the set"),
    FindingKind.REMOVABLE_TESTS: (Severity.ERROR, "deleting or emptying visible tests raises the reward"),
    FindingKind.SKIP_AS_PASS: (Severity.ERROR, "tests that are all skipped raise the reward"),
    FindingKind.SHADOWED_TESTS: (Severity.WARNING, "files of the agent run instead of the tests"),
    FindingKind.PLANTED_REWARD: (Severity.ERROR, "the grader reads a reward that the agent wrote"),
    FindingKind.LEAK: (Severity.ERROR, "the agent can read the solution, the tests or the answer"),
    FindingKind.FLAKY: (Severity.ERROR, "the same solution scores differently from run to run"),
    FindingKind.TIMEOUT_EDGE: (Severity.ERROR, "the reference exceeds a time limit, perhaps only under load"),
    FindingKind.HIDDEN_NETWORK: (Severity.ERROR, "the reference needs a network that is not there"),
    FindingKind.CONTRADICTION: (Severity.ERROR, "another task asks the same and expects something else"),
    FindingKind.DUPLICATE: (Severity.WARNING, "another task is the same, or nearly so"),
    FindingKind.MISSING_FILE: (Severity.WARNING, "the instruction names a file that does not exist"),
    FindingKind.OUTSIDE_FILES: (Severity.NOTE, "the reference leaves files outside of the workspace"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFinding:
    """Defect of one task.

    Args:
        kind: its kind.
        text: one sentence.
        probe: name of the probe that shows it, for `prorl-envs audit --probe`; "" if no episode is needed.
        evidence: what the probe saw; JSON.
    """

    kind: FindingKind
    text: str
    probe: str = ""
    evidence: JsonObject = field(default_factory=dict)

    @property
    def severity(self) -> Severity:
        return MEANING[self.kind][0]
