"""Conversion of public data sets of programming problems to our rows.

    APPS, TACO      question, input_output (JSON: inputs, outputs, fn_name), solutions, starter_code
    LiveCodeBench   question_content, public_test_cases, private_test_cases, metadata (JSON: func_name)
    HumanEval       prompt, entry_point, test, canonical_solution
    MBPP            text or prompt, code, test_list, test_imports or test_setup_code
    Eurus, verl     prompt (chat messages), reward_model (ground_truth: inputs, outputs, fn_name, or the list
                    of test cases of DeepCoder), perhaps as JSON texts

Formats are recognised by their fields; a row with `tests` is in our own format.
"""

import ast
import base64
import binascii
import builtins
import hashlib
import io
import json
import pickle
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prorl_envs.env.columns import decoded, user_text
from prorl_envs.envs.code.task import SOLUTION
from prorl_envs.errors import InputError
from prorl_envs.tools.types import JsonObject

#: Maximum bytes that a compressed field may unpack to.
_MAX_UNPACKED = 256 * 2**20
#: Tolerances of decimals, as those of the judges that the problems come from; amounts of money stay exact.
_TOLERANCES = {"rel_tol": 1e-9, "abs_tol": 1e-6}
_LIMITS = ("time_s", "memory_mb", "total_s")


def convert_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert `row` to our format; return a row of no known format unchanged.

    Raises:
        InputError: a field of a known format is wrong.
    """
    if "tests" in row:
        return row
    for field, read in (
        ("input_output", _apps), ("public_test_cases", _livecodebench), ("entry_point", _humaneval),
        ("test_list", _mbpp), ("reward_model", _verl),
    ):  # fmt: skip
        if field in row:
            return read(row)
    return row


def _apps(row: Mapping[str, Any]) -> JsonObject:
    data = _parsed(row["input_output"], "input_output")
    if not isinstance(data, Mapping):
        raise InputError("input_output: not an object")
    inputs, outputs = (_list(data.get(key), f"input_output.{key}") for key in ("inputs", "outputs"))
    if len(inputs) != len(outputs) or not inputs:
        raise InputError(f"input_output: {len(inputs)} inputs and {len(outputs)} outputs")
    starter = _text(row, "starter_code")
    tests = _calls(data["fn_name"], inputs, outputs) if data.get("fn_name") else _programs(inputs, outputs)
    solutions = _parsed(row["solutions"], "solutions") if row.get("solutions") else []
    reference = next((code for code in solutions if isinstance(code, str)), "")
    instruction = _instruction(_text(row, "question", needed=True), tests, starter)
    return _task(row, ("problem_id", "question"), instruction, tests, reference, starter)


def _programs(inputs: list[Any], outputs: list[Any]) -> JsonObject:
    """Convert inputs and outputs of programs, each a text or a list of lines."""
    joined = [
        ["\n".join(map(str, text)) if isinstance(text, list) else str(text) for text in texts]
        for texts in (inputs, outputs)
    ]
    cases = [{"input": text, "output": right} for text, right in zip(*joined, strict=True)]
    return {"type": "stdio", "cases": cases, "compare": "numbers", **_TOLERANCES}


def _calls(name: Any, inputs: list[Any], outputs: list[Any]) -> JsonObject:
    """Convert calls of a function. An output is the result, or a list with only the result: the data sets
    have both forms."""
    cases = []
    for number, (args, right) in enumerate(zip(inputs, outputs, strict=True)):
        args = _list(args, f"input_output.inputs.{number}")
        args = [_with_numbers(args[0])] if len(args) == 1 else args
        wrapped = isinstance(right, list) and len(right) == 1
        cases.append({"args": args, "expected": right, "alternatives": right if wrapped else []})
    return _function(name, cases)


def _with_numbers(value: Any) -> Any:
    """Return a dict with integers as keys if all of them are: JSON made texts of them."""
    numbers = isinstance(value, dict) and all(re.fullmatch(r"-?\d{1,18}", key, re.ASCII) for key in value)
    return {int(key): item for key, item in value.items()} if numbers else value


def _function(name: Any, cases: list[JsonObject]) -> JsonObject:
    return {"type": "function", "entry_point": name, "cases": cases, "compare": "floats", **_TOLERANCES}


def _livecodebench(row: Mapping[str, Any]) -> JsonObject:
    cases = [*_test_cases(row, "public_test_cases"), *_test_cases(row, "private_test_cases")]
    if not cases:
        raise InputError("public_test_cases: there are no test cases")
    metadata = _parsed(row["metadata"], "metadata") if row.get("metadata") else {}
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    if cases[0].get("testtype") == "functional" or name:
        tests = _function(name, [_call(case) for case in cases])
    else:
        tests = _programs([case["input"] for case in cases], [case["output"] for case in cases])
    starter = _text(row, "starter_code")
    instruction = _instruction(_text(row, "question_content", needed=True), tests, starter)
    reference = _text(row, "reference_solution")
    return _task(row, ("question_id", "question_content"), instruction, tests, reference, starter)


def _call(case: Mapping[str, Any]) -> JsonObject:
    """Convert a case of a function; its input has one argument per line, in JSON."""
    try:
        args = [json.loads(line) for line in str(case["input"]).split("\n") if line.strip()]
        return {"args": args, "expected": json.loads(str(case["output"]))}
    except ValueError as error:
        raise InputError(f"private_test_cases: an argument or result is not JSON: {error}") from error


def _test_cases(row: Mapping[str, Any], field: str) -> list[Mapping[str, Any]]:
    value = row.get(field) or "[]"
    if isinstance(value, str) and not value.lstrip().startswith("["):
        value = _unpacked(value, field)
    cases = _list(_parsed(value, field), field)
    for number, case in enumerate(cases):
        if not (isinstance(case, Mapping) and "input" in case and "output" in case):
            raise InputError(f"{field}.{number}: not an object with input and output")
    return cases


class _TextOnly(pickle.Unpickler):
    """Unpickler that refuses all names of classes and functions, because loading one may run code."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"names {module}.{name}")


def _unpacked(text: str, field: str) -> str:
    """Unpack LiveCodeBench's private cases: a text, pickled, compressed by zlib, and encoded in base64."""
    try:
        unpack = zlib.decompressobj()
        data = unpack.decompress(base64.b64decode(text, validate=True), _MAX_UNPACKED)
        if unpack.unconsumed_tail:
            raise InputError(f"{field}: larger than {_MAX_UNPACKED} bytes")
        value = _TextOnly(io.BytesIO(data)).load()
    except (binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, ValueError, IndexError) as error:
        raise InputError(f"{field}: neither JSON nor packed JSON: {error}") from error
    if not isinstance(value, str):
        raise InputError(f"{field}: contains a {type(value).__name__} instead of a text")
    return value


def _humaneval(row: Mapping[str, Any]) -> JsonObject:
    prompt, test, name = (_text(row, key, needed=True) for key in ("prompt", "test", "entry_point"))
    # The tests may use other functions of the prompt than the one to complete.
    tests = {"type": "script", "functions": [name], "prelude": prompt, "cases": [{"code": test}]}
    solution = _text(row, "canonical_solution")
    instruction = f"Complete this Python module; the function {name} is tested.\n\n```python\n{prompt}```"
    return _task(row, ("task_id", "prompt"), instruction, tests, prompt + solution if solution else "")


def _mbpp(row: Mapping[str, Any]) -> JsonObject:
    asserts = [str(line) for line in _list(row["test_list"], "test_list")]
    asserts += [str(line) for line in _list(row.get("challenge_test_list") or [], "challenge_test_list")]
    imports = row.get("test_imports") or []
    lines = [*map(str, _list(imports, "test_imports")), _text(row, "test_setup_code")]
    prelude = "\n".join(filter(None, lines))
    functions = _called(asserts, prelude)
    problem = _text(row, "text") or _text(row, "prompt", needed=True)
    instruction = f"{problem}\n\nThe tests call it like this:\n\n```python\n{asserts[0]}\n```"
    cases = [{"code": line} for line in asserts]
    tests = {"type": "script", "functions": functions, "prelude": prelude, "cases": cases}
    return _task(row, ("task_id", "text", "prompt"), instruction, tests, _text(row, "code"))


def _verl(row: Mapping[str, Any]) -> JsonObject:
    reward_model = decoded(row["reward_model"])
    truth = decoded(reward_model.get("ground_truth")) if isinstance(reward_model, Mapping) else None
    problem, name = user_text(row.get("prompt"), "prompt"), row.get("id") or row.get("instance_id")
    if name is None and isinstance(extra := decoded(row.get("extra_info")), Mapping):
        name = extra.get("index")
    rest = {key: value for key, value in row.items() if key not in ("id", "prompt", "reward_model")}
    cases = truth if isinstance(truth, list) else []
    if not isinstance(truth, Mapping | list) or not all(isinstance(case, Mapping) for case in cases):
        raise InputError("reward_model.ground_truth: neither inputs and outputs nor a list of test cases")
    if cases and (function := cases[0].get("fn_name")):
        inputs, outputs = ([case.get(key) for case in cases] for key in ("input", "output"))
        truth = {"fn_name": function, "inputs": inputs, "outputs": outputs}
    if isinstance(truth, Mapping):
        return _apps({**rest, "problem_id": name, "question": problem, "input_output": truth})
    metadata = decoded(cases[0].get("metadata")) if cases else None
    fields = {"question_id": name, "question_content": problem, "public_test_cases": cases}
    return _livecodebench({**rest, **fields, "metadata": metadata or {}})


def _called(asserts: Iterable[str], prelude: str) -> list[str]:
    """Return the functions that the tests call and that only the solution can define."""
    defined = set(dir(builtins)) | {"math"}
    try:
        for node in ast.walk(ast.parse(prelude)):
            defined |= {(alias.asname or alias.name).split(".")[0] for alias in getattr(node, "names", ())
                      if isinstance(alias, ast.alias)}  # fmt: skip
            defined |= {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set()
        trees = [ast.parse(line) for line in asserts]
    except (SyntaxError, ValueError) as error:
        raise InputError(f"test_list: not Python: {error}") from error
    names = [
        node.func.id
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in defined
    ]
    if not names:
        raise InputError("test_list: the tests call no function of the solution")
    return list(dict.fromkeys(names))


def _instruction(problem: str, tests: JsonObject, starter: str) -> str:
    """Return the problem, followed by the required form of the solution."""
    if tests["type"] == "stdio":
        return f"{problem}\n\nWrite a program that reads from standard input and prints to standard output."
    text = f"{problem}\n\nWrite the function {tests['entry_point']}, or a class Solution with that method."
    return f"{text} Begin with:\n\n```python\n{starter}\n```" if starter.strip() else text


def _task(
    row: Mapping[str, Any],
    id_fields: Sequence[str],
    instruction: str,
    tests: JsonObject,
    reference: str,
    starter: str = "",
) -> JsonObject:
    """Return a row in our format.

    Args:
        id_fields: as the fields of `_id`.
        reference: code of a right solution; "" without one.
    """
    task: JsonObject = {
        "id": _id(row, *id_fields),
        "instruction": instruction,
        "starter": starter,
        "tests": tests,
    }
    task |= _limits(row)
    if reference:
        # The editor's `create` would refuse to overwrite a starter file.
        write = {"code": f"open({SOLUTION!r}, 'w', encoding='utf-8').write({reference!r})"}
        task["reference"] = [{"tool": "ipython", "arguments": write}, {"tool": "finish", "arguments": {}}]
    return task


def _limits(row: Mapping[str, Any]) -> JsonObject:
    """Convert the limits of a row: TACO writes `2.0 seconds` and `256.0 megabytes`."""
    limits: JsonObject = {}
    for field, key in (("time_limit", "time_s"), ("memory_limit", "memory_mb")):
        if found := re.match(r"\s*(\d+(?:\.\d+)?)\s*(second|megabyte)?", str(row.get(field) or "")):
            number = float(found[1])
            # The limits of the data sets are for compiled programs; the Python interpreter needs more memory.
            limits[key] = max(number, 1.0) if key == "time_s" else max(int(number), 512)
    if isinstance(row_limits := row.get("limits"), Mapping):
        limits |= {key: value for key, value in row_limits.items() if key in _LIMITS}
    scoring = {"scoring": row["scoring"]} if "scoring" in row else {}
    return ({"limits": limits} if limits else {}) | scoring


def _id(row: Mapping[str, Any], *fields: str) -> str:
    """Return the id of a row: the field `id`, or `fields[0]`, or a digest of the problem in another field."""
    for field in ("id", *fields[:1]):
        if (value := row.get(field)) is not None and str(value):
            return str(value)[:200]
    problem = next((str(row[field]) for field in fields[1:] if row.get(field)), "")
    return hashlib.sha256(problem.encode("utf-8", "replace")).hexdigest()[:16]


def _text(row: Mapping[str, Any], field: str, *, needed: bool = False) -> str:
    value = row.get(field)
    if value is None and not needed:
        return ""
    if not isinstance(value, str) or (needed and not value.strip()):
        raise InputError(f"{field}: {'missing' if value is None else 'not a text, or empty'}")
    return value


def _parsed(value: Any, field: str) -> Any:
    """Return the value of a field, which may be a JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{field}: not JSON: {error}") from error


def _list(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise InputError(f"{field}: not a list")
    return list(value)
