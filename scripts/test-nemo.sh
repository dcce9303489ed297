#!/bin/sh
# Run the tests against a real NeMo Gym, in its own environment: test-nemo.sh [pytest arguments].
#   NEMO_GYM     version of NeMo Gym, such as 0.4 (the default), 0.7 or 0.7.0
#   NEMO_PYTHON  the interpreter; by default the script searches for Python 3.12, or 3.13 for NeMo Gym 0.5 and later
#   NEMO_VENV    directory of the environment (.venv-nemo for 0.4, .venv-nemo-0.7 for 0.7), about 1.5 GB; not removed
# If the environment already has this version of NeMo Gym, only this package is installed. Every run installs it as a
# wheel, as users do.
set -eu
cd "$(dirname "$0")/.."
base=${VENV:-.venv}
version=${NEMO_GYM:-0.4}
case $version in
    0.4 | 0.4.*) wanted=3.12 venv=${NEMO_VENV:-.venv-nemo} ;;
    *) wanted=3.13 venv=${NEMO_VENV:-.venv-nemo-$version} ;;
esac

. scripts/common.sh

case $version in
    [0-9]*.[0-9]*) ;;
    *) fail "NEMO_GYM=$version is not a version of NeMo Gym" "use a version such as 0.4 or 0.7" ;;
esac

scripts/setup.sh test "$base"
export UV_COMPILE_BYTECODE=1  # as setup.sh

if [ ! -x "$venv/bin/python" ]; then
    python=${NEMO_PYTHON:-$(scripts/find-python.sh "$wanted")} || fail "NeMo Gym $version needs Python $wanted" \
        "name an interpreter: NEMO_PYTHON=/path/to/python$wanted make test-nemo NEMO_GYM=$version"
    "$python" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$wanted')" \
        || fail "$python is not a working Python $wanted" "NeMo Gym $version needs $wanted; correct or unset NEMO_PYTHON"
    say "setting up $venv with $python and nemo-gym $version (1.4 GB, some minutes if nothing is cached)"
    scripts/uv.sh venv --python "$python" "$venv"
fi
# Later versions of NeMo Gym require a patch release of Python that few machines have, but they run on earlier patch
# releases. Packages are therefore resolved for a later patch release.
installed() { "$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("nemo-gym"))' 2>/dev/null; }
installed >/dev/null \
    || scripts/uv.sh pip install --python "$venv/bin/python" --python-version "$wanted.99" "nemo-gym==$version.*" \
    || fail "nemo-gym $version could not be installed into $venv" "see the messages above"
case $(installed). in
    "$version".*) ;;
    *) fail "$venv has nemo-gym $(installed), not $version" "remove it, or name another directory in NEMO_VENV" ;;
esac
scripts/uv.sh pip install --python "$venv/bin/python" --reinstall-package prorl-envs \
    '.[data]' --group dev \
    || fail "this package could not be installed into $venv" "see the messages above"

say "$("$venv/bin/python" -c 'import platform, importlib.metadata as m
print("nemo-gym", m.version("nemo-gym"), "on Python", platform.python_version())')"
uv=$(find_uv)
PATH=$PATH:$(cd "$(dirname "$uv")" && pwd)  # NeMo Gym calls uv
export PATH
# Not `python -m pytest`, which would import the checkout instead of the installed package.
exec "$venv/bin/pytest" -m nemo tests/nemo "$@"
