#!/usr/bin/env bash
# Install the programs that the image tests need on a Debian machine: Apptainer, squashfuse, FUSE, busybox. Needs root
# and a Debian mirror. If the release has no Apptainer, the script takes it from unstable, together with a separate C
# library for it; the system's C library does not change.
set -euo pipefail
[ "$(id -u)" = 0 ] || { echo "error: run as root" >&2; exit 1; }
export DEBIAN_FRONTEND=noninteractive

install() { apt-get -o DPkg::Lock::Timeout=300 install -y -q --no-install-recommends "$@" >/dev/null; }

apt-get update -q >/dev/null
install squashfuse squashfs-tools fuse3 uidmap util-linux busybox-static
# udev, if it runs, gives every user access to FUSE; do the same without udev.
if [ -e /dev/fuse ]; then chmod a+rw /dev/fuse; fi

command -v apptainer >/dev/null && exit 0
if apt-cache show apptainer >/dev/null 2>&1; then install apptainer; exit 0; fi

install patchelf
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
chmod 755 "$scratch"
mkdir -p "$scratch/lists/partial" "$scratch/cache/archives/partial" "$scratch/files"
mirror=$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' | grep -v security | head -1)
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror sid main" > "$scratch/sources"
unstable() {
    (cd "$scratch" && apt-get -q -o Dir::Etc::SourceList="$scratch/sources" -o Dir::Etc::SourceParts=- \
        -o Dir::State::Lists="$scratch/lists" -o Dir::Cache="$scratch/cache" -o APT::Sandbox::User=root "$@") >/dev/null
}
unstable update
unstable download apptainer libc6 libseccomp2 libsqlite3-0
for package in "$scratch"/*.deb; do dpkg-deb -x "$package" "$scratch/files"; done

# Copy the libraries of unstable to a separate directory. The two programs search for libraries only there.
own=/opt/apptainer-lib
architecture=$(dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null || gcc -dumpmachine 2>/dev/null || echo x86_64-linux-gnu)
libexec=/usr/lib/$architecture/apptainer
mkdir -p "$own" "$libexec/bin" /var/lib/apptainer/mnt/session
find "$scratch/files" -path "*$architecture/*" -maxdepth 5 -name '*.so*' ! -path '*/gconv/*' -exec cp -L {} "$own/" \;
loader=$(basename "$(find "$own" -name 'ld-linux*' | head -1)")
cp -a "$scratch/files/etc/apptainer" /etc/
cp "$scratch/files/usr/bin/apptainer" /usr/bin/
cp "$scratch/files$libexec/bin/starter" "$libexec/bin/"
for program in /usr/bin/apptainer "$libexec/bin/starter"; do
    patchelf --set-interpreter "$own/$loader" --force-rpath --set-rpath "$own" "$program"
done
apptainer --version
