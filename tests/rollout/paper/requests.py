"""Recorded requests of the clients of the ProRL Agent paper's server.

`run_math.py` sends each row of its table, `run_swe.py` the column `instance` of each row; both add the row's
number as `trajectory_id`. They register the model servers, start, process all rows concurrently, and stop. A
trainer first removes the model servers of the previous step; it has its own columns and sampling parameters.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

type Body = dict[str, Any]
type Sent = tuple[str, Body | None]

SAMPLING: Body = {
    "model": "hosted_vllm/Qwen/Qwen3-8B",
    "api_key": "mykey",
    "modify_params": False,
    "log_completions": False,
    "native_tool_calling": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "max_iterations": 35,
}
#: Further fields that a trainer sends.
TRAINER_SAMPLING: Body = {
    "max_output_tokens": 2048,
    "token_level_generation": True,
    "custom_tokenizer": "Qwen/Qwen3-8B",
    "max_model_len": 8192,
    "ensure_thinking_end_properly": False,
    "strict_loop_detector": True,
    "is_reasoning_task": False,
}


def math_rows(source: str = "deepscaler") -> list[Body]:
    """Return rows in the format of DeepScaleR's table for verl."""
    problems = {
        "What is 12 * 12?": "144",
        "What is 7 + 35?": "42",
        "2x = 18. What is x?": "9",
        "1 + 2 + 3?": "6",
    }
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"{problem} Put the answer in a box."}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": "train", "index": number},
        }
        for number, (problem, answer) in enumerate(problems.items())
    ]


def code_rows() -> list[tuple[Body, str]]:
    """Return rows in the format of Eurus-2's table, with JSON texts for objects, and their solutions."""
    problems = (
        ("deepcoder/train", "Double the number.", "print(int(input()) * 2)", "2\n", "4\n"),
        ("taco", "Print the square.", "print(int(input()) ** 2)", "3\n", "9\n"),
        ("codecontests", "Print it backwards.", "print(input()[::-1])", "abc\n", "cba\n"),
        ("apps", "Print the length.", "print(len(input()))", "abcd\n", "4\n"),
    )
    return [
        (
            {
                "data_source": source,
                "prompt": json.dumps([{"role": "user", "content": problem}]),
                "ability": "code",
                "reward_model": json.dumps(
                    {"style": "rule", "ground_truth": json.dumps({"inputs": [given], "outputs": [right]})}
                ),
                "extra_info": {"split": "train", "index": number},
            },
            solution,
        )
        for number, (source, problem, solution, given, right) in enumerate(problems)
    ]


def swe_row(row: Body) -> Body:
    """Return an instance as `prepare_data.py` writes it: its kind, and null in columns of other kinds.

    Args:
        row: row of SWE-bench; its column `x_env` is a JSON text with the build recipe without an image.
    """
    kept = {key: value for key, value in row.items() if not key.startswith("x_") and key != "difficulty"}
    others = dict.fromkeys(("docker_image", "parsed_commit_content", "commit_hash", "old_commit"))
    build = {"x_env": json.dumps(row["x_env"])}
    return {**kept, **build, "data_kind": "swebench", "data_source": "swebench", **others}


def script_requests(rows: Sequence[Body], llm: str) -> Iterator[Sent]:
    """Yield the requests of `run_math.py` and `run_swe.py`, in order; those of `/process` are concurrent."""
    yield "/add_llm_server", {"address": llm}
    yield "/start", None
    for number, row in enumerate(rows):
        yield "/process", {"instance": {**row, "trajectory_id": number}, "sampling_params": SAMPLING}
    yield "/stop", None


def trainer_requests(rows: Sequence[Body], llm: str, samples: int) -> Iterator[Sent]:
    """Yield the requests of a trainer's step: several trajectories of each row, with an `instance_id`."""
    yield "/clear_llm_server", None
    yield "/add_llm_server", {"address": llm.removesuffix("/v1")}
    yield "/start", None
    for number, row in enumerate(rows):
        for sample in range(samples):
            own = {"instance_id": f"row-{number}", "trajectory_id": sample, "policy_version": 0}
            yield (
                "/process",
                {"instance": {**row, **own}, "sampling_params": {**SAMPLING, **TRAINER_SAMPLING}},
            )
    yield "/stop", None
