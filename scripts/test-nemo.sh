#!/bin/sh
# The tests against a real NeMo Gym, in an environment of its own: test-nemo.sh [pytest arguments].
#   NEMO_GYM   what to install (nemo-gym==0.4.*)
#   NEMO_VENV  where (.venv-nemo); kept, about 1.5 GB. An environment that has NeMo Gym is used as it is.
# This package is installed into it as a wheel, as users install it, and again on every run.
set -eu
cd "$(dirname "$0")/.."
nemo=${NEMO_GYM:-nemo-gym==0.4.*}
venv=${NEMO_VENV:-.venv-nemo}
base=${VENV:-.venv}

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $1"; say "hint: $2"; exit 1; }

scripts/setup.sh test "$base"
export UV_COMPILE_BYTECODE=1  # as setup.sh
uv=$(command -v uv || printf '%s' "$base/bin/uv")

if [ ! -x "$venv/bin/python" ]; then
    say "setting up $venv with $nemo (1.4 GB, some minutes where nothing is cached)"
    "$uv" venv --quiet --python "$base/bin/python" "$venv"
fi
"$venv/bin/python" -c 'import nemo_gym' 2>/dev/null \
    || "$uv" pip install --quiet --python "$venv/bin/python" "$nemo" \
    || fail "$nemo could not be installed" "it needs Python 3.12, from 0.5 on 3.13; see the messages above"
"$uv" pip install --quiet --python "$venv/bin/python" --reinstall-package prorl-envs \
    '.[data]' --group dev \
    || fail "this package could not be installed into $venv" "see the messages above"

# Not `python -m pytest`: that would put the checkout before what was installed.
exec "$venv/bin/pytest" -m nemo tests/nemo "$@"
