#!/usr/bin/env bash
# Run the README's commands as an ordinary user in a new Debian system: test-install.sh [RELEASE]. The system has only
# Python, git, make and certificates. Needs root, mmdebstrap and a Debian mirror; takes some minutes.
#   RELEASE        bookworm (Python 3.11, too old for this package) or trixie (3.13); bookworm by default
#   INSTALL_TESTS  the tests that `make test` runs in the system; all by default
# The system uses this machine's network, certificates, proxies and apt's download settings, and nothing else.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/common.sh
release=${1:-bookworm}
tests=${INSTALL_TESTS:-}

[ "$(id -u)" = 0 ] || fail "this script needs root" "run it as root"
command -v mmdebstrap >/dev/null || fail "mmdebstrap is missing" "apt-get install mmdebstrap"
mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep -v security | head -1)

root=$(mktemp -d "${TMPDIR:-/tmp}/prorl-debian.XXXXXX")
trap 'rm -rf "$root"' EXIT
say "making a Debian $release in $root"
mmdebstrap --quiet --mode=root --variant=minbase --include=python3,git,make,ca-certificates "$release" "$root" \
    "deb $mirror $release main"
apt-config dump | grep -E '^Acquire::(Check-Valid-Until|https?)' > "$root/etc/apt/apt.conf.d/99machine" || :
useradd --root "$root" --create-home --shell /bin/bash user
git clone --quiet "file://$PWD" "$root/home/user/prorl-envs"
chroot "$root" chown -R user: /home/user

# pivot_root is used instead of chroot, because a process in a chroot may not create user namespaces.
certificates=${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}
inside() {
    unshare --mount --pid --fork --kill-child --propagation private sh -ec '
        root=$1 certificates=$2; shift 2
        mount --bind "$root" "$root"
        cd "$root"
        mount --rbind /dev dev
        mount -t proc proc proc
        mount -t tmpfs -o mode=1777 tmpfs tmp
        mount --bind "$certificates" etc/ssl/certs/ca-certificates.crt
        for name in resolv.conf hosts; do touch "etc/$name"; mount --bind "/etc/$name" "etc/$name"; done
        pivot_root . .
        umount -l .
        cd /home/user/prorl-envs
        exec setpriv --reuid user --regid user --clear-groups env -i HOME=/home/user USER=user PATH=/usr/bin:/bin \
            LANG=C.UTF-8 ${HTTPS_PROXY:+HTTPS_PROXY="$HTTPS_PROXY"} ${NO_PROXY:+NO_PROXY="$NO_PROXY"} "$@"
    ' sh "$root" "$certificates" "$@"
}

step() { printf '\n== %s ==\n' "$*"; inside sh -c "$*"; }
step 'grep PRETTY /etc/os-release; python3 --version; python3 -m ensurepip --version || true'
step make demo
step .venv/bin/prorl-envs doctor
step "make test ARGS='$tests'"
