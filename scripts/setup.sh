#!/bin/sh
# Set up .venv for one of two purposes: `setup.sh demo` (light) or `setup.sh test` (with the developers' tools).
# A second argument names another place than .venv. Finds a suitable Python by itself; SETUP_PYTHON names one.
# Does nothing when all is in place.
set -eu
cd "$(dirname "$0")/.."
purpose=${1:-demo}
venv=${2:-.venv}

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $1"; say "hint: $2"; exit 1; }

suitable() { "$1" -c 'import sys, ssl, sqlite3; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; }

find_python() {
    if [ -n "${SETUP_PYTHON:-}" ]; then
        suitable "$SETUP_PYTHON" || fail "SETUP_PYTHON=$SETUP_PYTHON is not a working Python 3.12 or later" \
            "point it at another interpreter, or unset it"
        printf '%s' "$SETUP_PYTHON"
        return
    fi
    for name in python3.12 python3.13 python3.14 python3 python; do
        path=$(command -v "$name") || continue
        if suitable "$path"; then printf '%s' "$path"; return; fi
    done
    for path in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3 /opt/python*/bin/python3; do
        if [ -x "$path" ] && suitable "$path"; then printf '%s' "$path"; return; fi
    done
    if command -v uv >/dev/null && path=$(uv python find --no-project '>=3.12' 2>/dev/null); then
        printf '%s' "$path"
        return
    fi
    if command -v uv >/dev/null && uv python install 3.12 >&2; then uv python find '>=3.12'; return; fi
    fail "no Python 3.12 or later was found" \
        "install python3.12 with its venv module, or uv (which can fetch one), or set SETUP_PYTHON"
}

# Where Python is told to keep no bytecode, every start of a command would compile hundreds of modules for seconds.
export UV_COMPILE_BYTECODE=1
compile_ours() {
    [ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || "$venv/bin/python" -m compileall -q prorl_envs envs || true
}

stamp="$venv/.prorl-$purpose"
wanted=$(cat pyproject.toml uv.lock | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then compile_ours; exit 0; fi

[ "$(uname -s)" = Linux ] || fail "prorl-envs runs on Linux only" "its sandboxes are Linux namespaces"
if [ ! -x "$venv/bin/python" ]; then
    python=$(find_python)
    say "setting up $venv with $python"
    "$python" -m venv "$venv" || fail "python -m venv failed" \
        "on Debian and Ubuntu: apt-get install python3-venv; or install uv and run: uv venv $venv"
fi
if command -v uv >/dev/null; then uv=uv; else
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null
    [ -x "$venv/bin/uv" ] || "$venv/bin/python" -m pip install --quiet uv \
        || fail "uv could not be installed from PyPI" "check the network, or the proxy and index settings of pip"
    uv=$venv/bin/uv
fi

groups="--no-default-groups"
[ "$purpose" = test ] && groups="--group dev"
# The lock file names the public index; behind a private mirror we resolve from pyproject.toml instead.
# --inexact keeps what the other purpose installed.
# shellcheck disable=SC2086
UV_PROJECT_ENVIRONMENT=$venv "$uv" sync --quiet --frozen --inexact --extra data $groups || {
    say "the locked set could not be installed; resolving again from the configured index"
    VIRTUAL_ENV=$venv "$uv" pip install --quiet -e '.[data]' $([ "$purpose" = test ] && echo --group dev)
} || fail "the dependencies could not be installed" "see the messages above; the index must serve PyPI's packages"
compile_ours
printf '%s\n' "$wanted" > "$stamp"
