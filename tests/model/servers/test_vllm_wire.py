"""Answers of a hostile server: parsed, or refused with a reason."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl_envs.errors import ModelError
from prorl_envs.model.answer_checks import RequestContract
from prorl_envs.model.http.client import first_model
from prorl_envs.model.servers.vllm_wire import encode_request, read_answer
from prorl_envs.model.types import Sampling

EXPECTED = RequestContract([1, 2, 3], max_tokens=4, vocab_size=10, server="http://s")


def answer(**changes: Any) -> dict[str, Any]:
    logprobs = {"tokens": ["a", "b"], "token_logprobs": [-0.5, -1.5]}
    choice = {"index": 0, "text": "ab", "finish_reason": "stop", "token_ids": [4, 5], "logprobs": logprobs}
    return {"choices": [{**choice, **changes}]}


def read(value: object) -> Any:
    return read_answer(json.dumps(value).encode(), EXPECTED)


def test_an_answer_of_vllm() -> None:
    sampled = read(answer(prompt_token_ids=[1, 2, 3]))
    assert sampled.ids == (4, 5)
    assert sampled.logprobs == (-0.5, -1.5)
    assert sampled.finish_reason == "stop"
    assert sampled.server == "http://s"


def test_logprobs_of_the_other_route() -> None:
    assert read(answer(logprobs={"content": [{"logprob": -0.5}, {"logprob": -1.5}]})).logprobs == (-0.5, -1.5)


@pytest.mark.parametrize(
    ("place", "version"),
    [
        ({"weight_version": "v3"}, "v3"),
        ({"weight_version": 3}, "3"),
        ({"meta_info": {"weight_version": 3}}, "3"),
    ],
)
def test_the_weight_version_is_found(place: dict[str, Any], version: str) -> None:
    assert read({**answer(), **place}).weight_version == version


@pytest.mark.parametrize("echo", ["[1,2,3]", "[1, 2, 3]", "null"])
def test_an_echoed_prompt_may_be_in_any_format(echo: str) -> None:
    body = json.dumps(answer(prompt_token_ids=0)).replace(
        '"prompt_token_ids": 0', f'"prompt_token_ids":{echo}'
    )
    assert read_answer(body.encode(), EXPECTED).ids == (4, 5)


@pytest.mark.parametrize("echo", [[1, 2], [1, 2, 4], [], {}, "123", [1.5, 2, 3]])
def test_an_answer_to_another_prompt_is_refused(echo: object) -> None:
    with pytest.raises(ModelError, match=r"another prompt|completion"):
        read(answer(prompt_token_ids=echo))


def test_logprobs_slightly_above_zero_are_accepted() -> None:
    assert read(answer(logprobs={"token_logprobs": [1e-6, -1.5]})).logprobs == (0.0, -1.5)


def test_an_abort_may_come_before_the_first_token() -> None:
    sampled = read(answer(finish_reason="abort", token_ids=[], logprobs=None))
    assert (sampled.ids, sampled.logprobs, sampled.finish_reason) == ((), (), "abort")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (answer(token_ids=[4, 10]), "outside the vocabulary"),
        (answer(token_ids=[4, -1]), "outside the vocabulary"),
        (answer(token_ids=[1] * 5, logprobs={"token_logprobs": [-1] * 5}), "returned 5 ids"),
        (answer(token_ids=["4", "5"]), "completion"),
        (answer(token_ids=[4.5, 5]), "completion"),
        (answer(token_ids=[True, 5]), "completion"),
        (answer(token_ids=None), "token ids"),
        (answer(token_ids=[4]), "2 log-probabilities for 1"),
        (answer(logprobs=None), "no log-probabilities"),
        (answer(logprobs={"tokens": ["a", "b"]}), "no log-probabilities"),
        (answer(logprobs={"token_logprobs": [None, -1]}), "impossible"),
        (answer(logprobs={"token_logprobs": [0.5, -1]}), "impossible"),
        (answer(finish_reason="tired"), "unknown reason"),
        (answer(finish_reason=None), "unknown reason"),
        (answer(token_ids=[], logprobs=None), "no ids"),
        (answer(prompt_token_ids=[0, 1, 2, 3]), "another prompt"),
        ({"choices": []}, "0 choices"),
        ({"choices": answer()["choices"] * 2}, "2 choices"),
        ({"error": "x"}, "completion"),
        ([], "completion"),
    ],
)
def test_implausible_answers_are_refused(value: object, says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        read(value)
    assert "http://s" in caught.value.message


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "-1e999"])
def test_numbers_that_json_does_not_have(number: str) -> None:
    body = json.dumps(answer()).replace("-1.5", number).encode()
    with pytest.raises(ModelError):
        read_answer(body, EXPECTED)


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_parsed(body: bytes) -> None:
    with pytest.raises(ModelError):
        read_answer(body, EXPECTED)
    with pytest.raises(ModelError):
        first_model(body, "http://s")


def test_without_a_known_vocabulary_any_id_is_accepted() -> None:
    expected = RequestContract([1], max_tokens=2, vocab_size=None, server="http://s")
    assert read_answer(json.dumps(answer()).encode(), expected).ids == (4, 5)


def test_a_request_overrides_all_defaults_of_the_model() -> None:
    body = json.loads(encode_request("m", (1, 2), Sampling(temperature=0.7, top_p=0.9, max_tokens=3), (9,)))
    assert body["prompt"] == [1, 2]
    assert body["stop_token_ids"] == [9]
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.7, 0.9, 3)
    assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (-1, 0.0, 1.0)
    assert body["return_token_ids"] is True
    assert "seed" not in body
    assert json.loads(encode_request("m", (1,), Sampling(seed=5), ()))["seed"] == 5


def test_the_first_listed_model_is_used() -> None:
    assert first_model(b'{"data": [{"id": "a"}, {"id": "b"}]}', "http://s").id == "a"
    with pytest.raises(ModelError, match="no model"):
        first_model(b'{"data": []}', "http://s")
