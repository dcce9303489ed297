#!/usr/bin/env bash
# Run a command as an ordinary user in a new clone of this checkout: `as-ordinary-user.sh make demo`.
# Needs root. The script creates a user, and removes it at the end. If only root can read a suitable Python, the user
# gets a copy.
set -euo pipefail
[ "$(id -u)" = 0 ] || { echo "error: run as root" >&2; exit 1; }
[ $# -gt 0 ] || { echo "usage: $0 COMMAND [ARG ...]" >&2; exit 2; }
checkout=$(cd "$(dirname "$0")/.." && pwd)

user=prorl-$$
home=$(mktemp -d "${TMPDIR:-/tmp}/prorl-home.XXXXXX")
useradd --home-dir "$home" --no-create-home --shell /bin/bash "$user"
finish() {
    # Show and kill processes that the user still runs; they are leaks. Zombies are not counted, because they have exited.
    left=$(find /proc -maxdepth 1 -name '[0-9]*' -user "$user" -printf '%f\n' 2>/dev/null | while read -r pid; do
        grep -qs '^State:[[:space:]]*[^Z[:space:]]' "/proc/$pid/status" && echo "$pid $(tr '\0' ' ' < "/proc/$pid/cmdline")"
    done || true)
    [ -z "$left" ] || { printf 'error: left running:\n%s\n' "$left" >&2; printf '%s\n' "$left" | cut -d' ' -f1 | xargs -r kill -9; }
    rm -rf "$home"
    userdel "$user" 2>/dev/null || true
    [ -z "$left" ] || exit 1
}
trap finish EXIT
trap 'exit 143' HUP INT TERM
mkdir "$home/tmp"
chown "$user:" "$home" "$home/tmp"
chmod 711 "$home"

as_user() {
    setpriv --reuid "$user" --regid "$user" --clear-groups \
        env -u XDG_RUNTIME_DIR -u PYENV_ROOT HOME="$home" USER="$user" TMPDIR="$home/tmp" "$@"
}

python=${SETUP_PYTHON:-}
if [ -z "$python" ] && ! as_user sh -c 'python3.12 -c "" || python3.13 -c ""' 2>/dev/null; then
    # Copy root's interpreter with its library, and make it search for the library relative to itself.
    for prefix in "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.1[2-9]*; do
        [ -x "$prefix/bin/python3" ] || continue
        cp -a "$prefix" "$home/python"
        if [ -e "$home/python/lib/libpython3.so" ]; then
            command -v patchelf >/dev/null || apt-get install -y -q --no-install-recommends patchelf >/dev/null
            patchelf --set-rpath '$ORIGIN/../lib' "$(readlink -f "$home/python/bin/python3")"
        fi
        chown -R "$user:" "$home/python"
        python=$home/python/bin/python3
        break
    done
fi

git clone --quiet "$checkout" "$home/prorl-envs"
chown -R "$user:" "$home/prorl-envs"
cd "$home/prorl-envs"
as_user ${python:+SETUP_PYTHON="$python"} "$@"
