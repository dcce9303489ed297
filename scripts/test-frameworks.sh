#!/bin/sh
# Test the modules in prorl_envs/integrations with the real frameworks, each in its own environment:
#   test-frameworks.sh [NAME...] [-- pytest arguments]
# Names: harbor; all by default.
#   FRAMEWORKS_VENVS  directory of the environments (.build/frameworks), up to 1 GB each; they are not removed
set -eu
cd "$(dirname "$0")/.."
venvs=${FRAMEWORKS_VENVS:-.build/frameworks}
base=${VENV:-.venv}

. scripts/common.sh

scripts/setup.sh test "$base"

packages() {
    case $1 in
        harbor) echo 'harbor==0.26.*' ;;
        *) fail "there is no framework $1" "harbor" ;;
    esac
}

names=
while [ $# -gt 0 ] && [ "$1" != -- ]; do names="$names $1"; shift; done
[ $# -eq 0 ] || shift
for name in ${names:-harbor}; do
    wanted=$(packages "$name")
    venv=$venvs/$name
    [ -x "$venv/bin/python" ] || scripts/uv.sh venv --python "$base/bin/python" "$venv"
    # shellcheck disable=SC2086
    scripts/uv.sh pip install --python "$venv/bin/python" \
        -e . pytest pytest-timeout pytest-xdist hypothesis anyio $wanted \
        || fail "the packages of $name could not be installed" "see the messages above"
    say "== $name"
    TEST_FRAMEWORK=$name "$venv/bin/python" -m pytest -m frameworks -n 0 "tests/integrations/test_$(printf '%s' "$name" | tr - _).py" "$@"
done
