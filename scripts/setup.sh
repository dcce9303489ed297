#!/bin/sh
# Set up .venv for one of two purposes: `setup.sh demo`, or `setup.sh test` with the developers' tools. A second
# argument names another directory than .venv. The script needs only Python 3.9: it installs uv into .build/uv if uv is
# not in PATH, and Python 3.12 if the machine has no suitable version. SETUP_PYTHON names an interpreter. If the
# environment is up to date, the script does nothing.
set -eu
cd "$(dirname "$0")/.."
purpose=${1:-demo}
VENV=${2:-.venv}
export VENV
. scripts/common.sh

suitable() { "$1" -c 'import sys, ssl, sqlite3; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; }

# Print the path of any Python that can run pip and uv.
find_old_python() {
    for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python3.9 python; do
        path=$(command -v "$name") || continue
        if "$path" -c 'import sys, ssl, venv; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
            printf '%s' "$path"
            return
        fi
    done
    fail "neither uv nor a Python 3.9 or later was found" "install python3, or uv: https://docs.astral.sh/uv/"
}

install_uv() {
    python=${SETUP_PYTHON:-$(find_old_python)}
    say "installing uv into .build/uv with $python"
    rm -rf .build/uv
    pip=
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv .build/uv
    else
        "$python" -m venv --without-pip .build/uv
        pip=$(.build/uv/bin/python scripts/fetch-pip.py .build/uv) || fail "pip could not be downloaded" \
            "check the network; PIP_INDEX_URL names another index, PIP_CERT the certificates of a proxy"
    fi
    PYTHONPATH=$pip .build/uv/bin/python -m pip install --quiet --disable-pip-version-check uv || fail \
        "uv could not be installed from the package index" "check the network, and pip's settings of proxy and index"
}

find_python() {
    if [ -n "${SETUP_PYTHON:-}" ]; then printf '%s' "$SETUP_PYTHON"; return; fi
    for name in python3.12 python3.13 python3.14 python3 python; do
        path=$(command -v "$name") || continue
        if suitable "$path"; then printf '%s' "$path"; return; fi
    done
    for path in "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.1[2-9]*/bin/python3 /opt/python*/bin/python3; do
        if [ -x "$path" ] && suitable "$path"; then printf '%s' "$path"; return; fi
    done
    if path=$(scripts/uv.sh python find --no-project '>=3.12' 2>/dev/null); then printf '%s' "$path"; return; fi
    say "no Python 3.12 or later was found; uv downloads one"
    if scripts/uv.sh python install 3.12 >&2; then scripts/uv.sh python find --no-project 3.12; return; fi
    # If GitHub cannot be reached, Debian's mirror often can.
    if grep -qs '^ID=debian' /etc/os-release; then
        say "that failed; unpacking Python 3.13 from Debian into .build/python3.13"
        if path=$(scripts/unpack-python.sh 3.13 .build/python3.13); then printf '%s' "$path"; return; fi
    fi
    fail "no Python 3.12 or later was found, and none could be downloaded" \
        "install python3.12, or name an interpreter in SETUP_PYTHON, or a mirror of uv's Pythons in UV_PYTHON_INSTALL_MIRROR"
}

# If Python is configured to write no bytecode, every start of a command would compile hundreds of modules.
export UV_COMPILE_BYTECODE=1
compile_ours() {
    [ -z "${PYTHONDONTWRITEBYTECODE:-}" ] || "$VENV/bin/python" -m compileall -q prorl_envs envs || true
}

stamp="$VENV/.prorl-$purpose"
wanted=$(cat pyproject.toml uv.lock | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then compile_ours; exit 0; fi

[ "$(uname -s)" = Linux ] || fail "prorl-envs runs on Linux only" "its sandboxes are Linux namespaces"
[ -z "${SETUP_PYTHON:-}" ] || suitable "$SETUP_PYTHON" \
    || fail "SETUP_PYTHON=$SETUP_PYTHON is not a working Python 3.12 or later" "name another interpreter, or unset it"
# The demo needs sandboxes, so check for user namespaces before the installation. With Apptainer they are not required.
if [ "$purpose" = demo ] && [ -z "${PRORL_DRIVER:-}" ] && ! command -v apptainer singularity >/dev/null; then
    python=${SETUP_PYTHON:-$(find_old_python 2>/dev/null)} || python=
    [ -z "$python" ] || "$python" -I prorl_envs/sandbox/linux/user_namespaces.py || exit 1
fi
trust_certificates
use_index
find_uv >/dev/null || install_uv
if [ ! -x "$VENV/bin/python" ]; then
    python=$(find_python)
    say "setting up $VENV with $python"
    scripts/uv.sh venv --seed --allow-existing --python "$python" "$VENV"
fi
# Users of the environment may need uv without these scripts.
command -v uv >/dev/null || [ -x "$VENV/bin/uv" ] || ln -f .build/uv/bin/uv "$VENV/bin/uv" 2>/dev/null \
    || cp .build/uv/bin/uv "$VENV/bin/uv"

group=
[ "$purpose" = test ] && group="--group dev"
# uv.lock names files of the public index. The same versions and hashes are installed from the configured index, which
# may be a mirror. Packages of the other purpose are not removed.
locked="$VENV/locked.txt"
# shellcheck disable=SC2086
{
    scripts/uv.sh export --frozen --no-default-groups $group --extra data --no-emit-project --no-annotate -o "$locked" >/dev/null \
        && scripts/uv.sh pip install -r "$locked" && scripts/uv.sh pip install --no-deps -e .
} || {
    say "the locked versions could not be installed from the index; installing the newest compatible versions, which are not tested"
    scripts/uv.sh pip install -e '.[data]' $group
} || fail "the dependencies could not be installed" "see the messages above: the index must serve PyPI's packages; \
for an unknown issuer, name the certificates of your proxy in SSL_CERT_FILE (docs/install.md)"
compile_ours
printf '%s\n' "$wanted" > "$stamp"
