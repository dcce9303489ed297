"""`prorl-envs audit` from end to end: tables, JSON, the record, and runs that demand it."""

import json
from pathlib import Path
from typing import Any

from tests.cli.conftest import Cli
from tests.viewer.conftest import result, written


def row(name: str, check: str = "[ ! -e f ]") -> dict[str, Any]:
    return {
        "id": name, "instruction": f"Remove the file f. {name}", "files": {"f": "x"},
        "checks": [{"type": "command", "name": "c", "command": check}],
        "reference": [{"tool": "bash", "arguments": {"command": "rm f"}}],
    }  # fmt: skip


def test_findings_are_shown_recorded_and_demanded(cli: Cli, tmp_path: Path) -> None:
    rows = [row("honest"), row("planted", "[ ! -e f ] || grep -q 1 score.txt")]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    done = cli("audit", "bash", "tasks.jsonl", "--record", "audit.jsonl")
    said = " ".join(done.stdout.split())
    assert done.returncode == 1 and "planted_reward" in said and "1 of 2 tasks pass (prorl-envs " in said
    assert "error: planted: a workspace with nothing but reward files scores 1" in said

    record = (tmp_path / "audit.jsonl").read_bytes()
    again = cli("audit", "bash", "tasks.jsonl", "--record", "audit.jsonl", "--json")
    (first, second) = json.loads(again.stdout)
    assert again.returncode == 1 and (tmp_path / "audit.jsonl").read_bytes() == record
    assert first["ok"] and not second["ok"] and second["reference"] == [1.0, 1.0]
    (finding,) = second["findings"]
    assert (finding["severity"], finding["probe"]) == ("error", "planted-reward") and finding["evidence"]

    one = cli("audit", "bash", "tasks.jsonl", "--task", "planted", "--probe", "deleted-tests")
    assert one.returncode == 0 and "1 of 1 tasks pass" in one.stdout
    unknown = cli("audit", "bash", "tasks.jsonl", "--task", "other")
    assert unknown.returncode == 2 and "the data file has no task 'other'" in unknown.stderr

    wrong = cli("audit", "bash", "tasks.jsonl", "--probe", "luck")
    assert wrong.returncode == 2 and "there is no probe 'luck'" in wrong.stderr
    partly = cli("audit", "bash", "tasks.jsonl", "--probe", "busy", "--record", "audit.jsonl")
    assert partly.returncode == 2 and "a record holds whole audits" in partly.stderr

    model = ("--llm", "http://127.0.0.1:1", "--data", "tasks.jsonl")
    run = cli("run", "bash", *model, "--require-audit", "audit.jsonl")
    assert "left out: planted: its audit found: planted_reward" in run.stderr and "honest" not in run.stderr
    named = cli("run", "bash", *model, "--require-audit", "audit.jsonl", "--task", "planted")
    assert named.returncode == 2 and "no task passed the audit in audit.jsonl" in named.stderr
    none = cli("run", "bash", *model, "--require-audit", "tasks.jsonl")
    assert none.returncode == 2 and "not a line of an audit's record" in none.stderr


def test_the_steps_of_a_run_that_a_person_should_see_are_listed(cli: Cli, tmp_path: Path) -> None:
    function = {"name": "bash", "arguments": '{"command": "echo 1 > /logs/verifier/reward.txt"}'}
    cheat = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
    ]
    results = [
        result("demo/bash/git-rescue/0", messages=cheat, task_id="git-rescue"),
        result("demo/bash/git-rescue/1", messages=cheat, task_id="git-rescue", reward=0.0),
    ]
    written(tmp_path / "results.jsonl", *results)
    done = cli("audit", "--run", "results.jsonl", "--json")
    (step,) = [line for line in json.loads(done.stdout) if line["kind"] == "wrote_reward"]
    assert done.returncode == 1 and (step["job_id"], step["message"]) == ("demo/bash/git-rescue/0", 1)
    shown = cli("audit", "--run", "results.jsonl")
    assert "1 of 1 rewarded episodes have suspicious steps" in shown.stdout
    assert "name an environment" in cli("audit").stderr
