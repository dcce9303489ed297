#!/bin/sh
# The tests against a real NeMo Gym, in an environment of its own: test-nemo.sh [pytest arguments].
#   NEMO_GYM     its version: 0.4 (the default), 0.7, 0.7.0
#   NEMO_PYTHON  the interpreter; else a Python 3.12 is looked for, or for 0.5 and later a Python 3.13
#   NEMO_VENV    where (.venv-nemo for 0.4, .venv-nemo-0.7 for 0.7); kept, about 1.5 GB
# An environment that has NeMo Gym is used as it is. This package is installed into it as a wheel, as users
# install it, and again on every run.
set -eu
cd "$(dirname "$0")/.."
base=${VENV:-.venv}
version=${NEMO_GYM:-0.4}
case $version in
    0.4 | 0.4.*) wanted=3.12 venv=${NEMO_VENV:-.venv-nemo} ;;
    *) wanted=3.13 venv=${NEMO_VENV:-.venv-nemo-$version} ;;
esac

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $1"; say "hint: $2"; exit 1; }

case $version in
    [0-9]*.[0-9]*) ;;
    *) fail "NEMO_GYM=$version is no version of NeMo Gym" "give one such as 0.4 or 0.7" ;;
esac

fits() { "$1" -c "import sys, ssl, sqlite3; sys.exit('%d.%d' % sys.version_info[:2] != '$wanted')" 2>/dev/null; }

find_python() {
    if [ -n "${NEMO_PYTHON:-}" ]; then
        fits "$NEMO_PYTHON" || fail "NEMO_PYTHON=$NEMO_PYTHON is no working Python $wanted" \
            "NeMo Gym $version wants $wanted; point it at one, or unset it"
        printf '%s' "$NEMO_PYTHON"
        return
    fi
    for path in "$(command -v "python$wanted")" "$base/bin/python" \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$wanted"*/bin/python3 "/opt/python$wanted"*/bin/python3 \
        "$("$uv" python find --no-project "$wanted" 2>/dev/null)"; do
        if [ -x "$path" ] && fits "$path"; then printf '%s' "$path"; return; fi
    done
    fail "NeMo Gym $version wants Python $wanted, and none was found" \
        "uv python install $wanted, or name one: NEMO_PYTHON=/path/to/python$wanted make test-nemo NEMO_GYM=$version"
}

scripts/setup.sh test "$base"
export UV_COMPILE_BYTECODE=1  # as setup.sh
uv=$(command -v uv || printf '%s' "$base/bin/uv")

if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python)
    say "setting up $venv with $python and nemo-gym $version (1.4 GB, some minutes where nothing is cached)"
    "$uv" venv --quiet --python "$python" "$venv"
fi
# Its later versions declare a patch release of Python that few machines have, and run on earlier ones: packages
# are chosen as for the last one there will be.
"$venv/bin/python" -c 'import nemo_gym' 2>/dev/null \
    || "$uv" pip install --quiet --python "$venv/bin/python" --python-version "$wanted.99" "nemo-gym==$version.*" \
    || fail "nemo-gym $version could not be installed into $venv" "see the messages above"
"$uv" pip install --quiet --python "$venv/bin/python" --reinstall-package prorl-envs \
    '.[data]' --group dev \
    || fail "this package could not be installed into $venv" "see the messages above"

say "$("$venv/bin/python" -c 'import platform, importlib.metadata as m
print("nemo-gym", m.version("nemo-gym"), "on Python", platform.python_version())')"
# Not `python -m pytest`: that would put the checkout before what was installed.
exec "$venv/bin/pytest" -m nemo tests/nemo "$@"
