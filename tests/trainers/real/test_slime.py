"""slime's own rollout loop over the service, and its parsing of the example: SLIME_SOURCE names a checkout,
as PyPI has no slime."""

import asyncio
import json
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from prorl_envs.rollout.api.types import AgentLimits, JobState
from prorl_envs.testing.tokenizer import tokenizer_folder
from prorl_envs.trainers import slime as adapter
from prorl_envs.trainers.asking import connect_sync
from prorl_envs.trainers.rollouts import close_shared
from prorl_envs.trainers.slime import rows
from tests.support.serving import served
from tests.trainers.conftest import task, toy_service

pytestmark = [pytest.mark.trainers, pytest.mark.filterwarnings("ignore"), pytest.mark.anyio]
if "SLIME_SOURCE" not in os.environ:
    pytest.skip("SLIME_SOURCE names no checkout of slime", allow_module_level=True)
sys.path.insert(0, os.environ["SLIME_SOURCE"])
EXAMPLE = Path(__file__).parents[3] / "examples" / "trainers" / "slime"


def router() -> FastAPI:
    """Replacement of SGLang's router for slime's requests at the end of a batch; it has no workers to
    abort."""
    app = FastAPI()

    @app.get("/workers")
    async def workers() -> dict[str, list[str]]:
        return {"workers": []}

    return app


def arguments(url: str, router_url: str) -> Namespace:
    """Return slime's arguments, with those of the adapter."""
    ours = {
        "prorl_url": url,
        "prorl_environment": "toy",
        "custom_generate_function_path": "prorl_envs.trainers.slime.generate",
        "dynamic_sampling_filter_path": "prorl_envs.trainers.slime.keep_informative",
    }
    address, port = router_url.removeprefix("http://").split(":")
    rollout: dict[str, Any] = dict.fromkeys(
        ("stop", "stop_token_ids", "sample_filter_path", "all_samples_process_path")
    )
    rollout |= {"num_gpus": 1, "num_gpus_per_engine": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1}
    rollout |= {
        "max_response_len": 256,
        "skip_special_tokens": False,
        "global_dataset": True,
        "batch_size": 2,
    }
    sglang: dict[str, Any] = {
        "server_concurrency": 64,
        "dp_size": 1,
        "router_ip": address,
        "router_port": int(port),
    }
    theirs: dict[str, Any] = {f"rollout_{name}": value for name, value in rollout.items()}
    theirs |= {f"sglang_{name}": value for name, value in sglang.items()}
    theirs |= {
        "over_sampling_batch_size": 3,
        "n_samples_per_prompt": 4,
        "hf_checkpoint": str(tokenizer_folder()),
    }
    theirs |= dict.fromkeys(
        ("partial_rollout", "mask_offpolicy_in_partial_rollout", "group_rm", "use_distributed_post"), False
    )
    theirs |= {"reward_key": None}
    return Namespace(**theirs, **ours)


async def test_slime_completes_its_batch_and_cancels_the_rest() -> None:
    from slime.rollout import sglang_rollout
    from slime.utils.http_utils import init_http_client
    from slime.utils.types import Sample

    made = rows([task(str(number)) for number in range(40)])
    given = iter(range(len(made)))

    def data_source(count: int) -> list[list[Any]]:
        return [
            [Sample(group_index=group, index=4 * group + n, **made[group]) for n in range(4)]
            for group, _ in zip(given, range(count), strict=False)
        ]

    with toy_service("solve=2,wrong=1,error500=1", latency_s=0.05) as toy, served(router()) as router_url:
        args = arguments(toy.url, router_url)
        init_http_client(args)
        try:
            output, aborted = await sglang_rollout.generate_rollout_async(args, 0, data_source)
        finally:
            await close_shared()
        await asyncio.to_thread(toy.until_empty)
        with connect_sync(toy.url) as client:
            states = {result.state for result in client.page(limit=1000).results}
    assert len(output.samples) == 2 and aborted == []
    for group in output.samples:
        known = [sample.reward for sample in group if not sample.remove_sample]
        assert {0.0, 1.0} == set(known)
        for sample in group:
            sample._validate_response_metadata_lengths()
            assert len(sample.tokens) > sample.response_length == len(sample.rollout_log_probs)
            assert Sample.from_dict(sample.to_dict()).tokens == sample.tokens
            if sample.remove_sample:
                assert sample.loss_mask == [0] and sample.status is Sample.Status.ABORTED
                assert sample.reward == pytest.approx(fmean(known))
            else:
                assert sample.status is Sample.Status.COMPLETED and sample.weight_versions
    assert JobState.DONE in states


def parsed(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Namespace:
    """Parse and check these arguments with slime; an unknown one is an error. Arguments of Megatron and
    SGLang are omitted: neither is installed, and the example sets none of them."""
    absent = SimpleNamespace(sglang_parse_args=None, validate_args=None)
    monkeypatch.setitem(sys.modules, "slime.backends.sglang_utils.arguments", absent)
    from slime.utils import arguments as slime_arguments

    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    parser = slime_arguments.get_slime_extra_args_provider()(ArgumentParser(allow_abbrev=False))
    args: Namespace = parser.parse_args(namespace=slime_arguments._pre_parse_mode())
    slime_arguments.slime_validate_args(args)
    return args


def test_slime_accepts_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the script as a user does: its data, its arguments, and the file that they name."""
    from slime.rollout.data_source import RolloutDataSource
    from slime.utils.misc import load_function

    monkeypatch.chdir(tmp_path)
    tasks = [task("a"), task("b")]
    Path("tasks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in tasks))
    shim = tmp_path / "python"
    shim.write_text(f'#!/bin/sh\n[ "$1" = train.py ] || exec {sys.executable} "$@"\nprintf "%s\\n" "$@"\n')
    shim.chmod(0o755)
    command = ["sh", str(EXAMPLE / "run.sh"), "tasks.jsonl", "--num-rollout", "1"]
    command += ["--hf-checkpoint", str(tokenizer_folder())]
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    told = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    _, given = told.split("train.py\n")
    args = parsed(given.splitlines(), monkeypatch)
    assert load_function(args.custom_generate_function_path) is adapter.generate
    assert load_function(args.dynamic_sampling_filter_path) is adapter.keep_informative
    assert (args.prorl_url, args.prorl_environment) == ("http://127.0.0.1:8600", "bash")
    assert AgentLimits.model_validate(args.prorl_limits).max_turns == 30
    group, other = RolloutDataSource(args).get_samples(2)
    assert len(group) == len(other) == args.n_samples_per_prompt
    assert json.loads(group[0].metadata["task"]) == tasks[0]
    with pytest.raises(SystemExit):
        parsed([*given.splitlines(), "--no-such-thing"], monkeypatch)
