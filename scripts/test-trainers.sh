#!/bin/sh
# Test the adapters in prorl_envs/trainers with the trainers' real packages, each in its own environment:
#   test-trainers.sh [NAME...] [-- pytest arguments]
# Names: trl verl skyrl openrlhf atropos harbor slime nemo-rl; the first six by default. Harbor is not a trainer: it
# reads our exported trajectories, and this package reads its tasks.
#   TRAINERS_VENVS  directory of the environments (.build/trainers), 1 to 6 GB each; they are not removed
#   TORCH_BACKEND   passed to uv; cpu uses PyTorch's own index and saves gigabytes (by default PyPI's torch)
#   SLIME_SOURCE    a checkout of slime, which is not on PyPI (PyPI's slime is another package)
#   NEMO_RL_SOURCE  a checkout of NeMo RL (PyPI has only a placeholder)
set -eu
cd "$(dirname "$0")/.."
venvs=${TRAINERS_VENVS:-.build/trainers}
base=${VENV:-.venv}

. scripts/common.sh

scripts/setup.sh test "$base"

# Print the packages of a trainer. OpenRLHF and SkyRL require flash-attn, deepspeed and vLLM, which a machine without a
# GPU can neither build nor use. Their packages are therefore installed without dependencies (see `bare`), and the
# dependencies that their code for rollouts imports are listed here.
packages() {
    case $1 in
        trl) echo 'trl==1.16.*' torch aiohttp requests ;;
        verl) echo 'verl==0.9.*' torch cachetools 'transferqueue==0.1.*' ;;
        skyrl) echo torch transformers loguru omegaconf hydra-core 'ray==2.57.0' jaxtyping tensordict torchdata \
            wandb cloudpathlib fsspec s3fs orjson pybase64 aiohttp datasets peft accelerate polars func-timeout tqdm ;;
        openrlhf) echo torch transformers ray aiohttp numpy tqdm pylatexenc datasets ;;
        atropos) echo 'atroposlib==0.4.*' ;;
        harbor) echo 'harbor==0.26.*' ;;
        slime) echo torch numpy ray tqdm transformers pylatexenc aiohttp sympy pillow wandb ;;
        nemo-rl) echo torch 'transformers<5.12' 'nemo-gym==0.4.*' hydra-core nvidia-ml-py soundfile swanlab tensorboard \
            tensordict torchdata wandb ;;
        *) fail "there is no trainer $1" "trl verl skyrl openrlhf atropos harbor slime nemo-rl" ;;
    esac
}
bare() {
    case $1 in
        skyrl) echo 'skyrl==0.4.*' 'skyrl-gym==0.4.*' ;;
        openrlhf) echo 'openrlhf==0.11.*' ;;
    esac
}

names=
while [ $# -gt 0 ] && [ "$1" != -- ]; do names="$names $1"; shift; done
[ $# -eq 0 ] || shift
for name in ${names:-trl verl skyrl openrlhf atropos harbor}; do
    wanted=$(packages "$name")
    venv=$venvs/$name
    if [ ! -x "$venv/bin/python" ]; then
        say "setting up $venv"
        scripts/uv.sh venv --python "$base/bin/python" "$venv"
    fi
    stamp=$(printf '%s' "$wanted $(bare "$name")" | cksum)
    if [ "$(cat "$venv/.prorl" 2>/dev/null)" != "$stamp" ]; then
        # shellcheck disable=SC2086
        scripts/uv.sh pip install --python "$venv/bin/python" ${TORCH_BACKEND:+--torch-backend "$TORCH_BACKEND"} \
            -e . pytest pytest-timeout pytest-xdist hypothesis anyio $wanted \
            || fail "the packages of $name could not be installed" "see the messages above"
        # shellcheck disable=SC2046
        [ -z "$(bare "$name")" ] || scripts/uv.sh pip install --python "$venv/bin/python" --no-deps $(bare "$name")
        printf '%s\n' "$stamp" >"$venv/.prorl"
    fi
    say "== $name"
    TEST_TRAINER=$name "$venv/bin/python" -m pytest -m trainers -n 0 "tests/trainers/real/test_$(printf '%s' "$name" | tr - _)"*.py "$@"
done
