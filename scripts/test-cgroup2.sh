#!/bin/sh
# Run the tests of limits that the kernel enforces: test-cgroup2.sh [COMMAND [ARG ...]].
# The tests run in a virtual machine with Debian's kernel and this machine's own files, which it cannot change. systemd,
# which must be installed on this machine, delegates a subtree of control groups to an ordinary user, who runs the
# command. In the command, $DELEGATED before a program runs it in its own scope. The default command runs
# `prorl-envs doctor` and the tests. Needs Debian or a derived distribution.
#   CGROUP2_DIR    directory of the kernel and of the virtual machine's boot messages, boot.log (.build/cgroup2, 500 MB)
#   CGROUP2_ACCEL  kvm, or tcg, which works on every machine but is many times slower (tcg)
set -eu
cd "$(dirname "$0")/.."
checkout=$(pwd -P)
venv=${VENV:-.venv}
kept=${CGROUP2_DIR:-.build/cgroup2}
. scripts/common.sh

scripts/setup.sh test "$venv" >&2
mkdir -p "$kept"
kept=$(cd "$kept" && pwd -P)
command -v qemu-system-x86_64 systemd-run >/dev/null \
    || fail "QEMU or systemd is missing" "apt-get install qemu-system-x86 systemd-sysv dbus-user-session"

if [ ! -f "$kept/.installed" ]; then
    image=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: //p')
    (cd "$kept" && apt-get download -q "$image" kmod busybox-static >&2)
    for package in "$kept"/*.deb; do dpkg-deb -x "$package" "$kept/system"; rm "$package"; done
    version=${image#linux-image-}
    for name in depmod modprobe; do ln -sf kmod "$kept/system/bin/$name"; done
    "$kept/system/bin/depmod" -b "$kept/system" "$version"
    first=$kept/first # the initial file system; it mounts the others
    mkdir -p "$first/bin" "$first/modules"
    cp "$kept/system/bin/busybox" "$first/bin"
    for module in virtio_pci 9pnet_virtio 9p overlay; do
        "$kept/system/bin/modprobe" -d "$kept/system" -S "$version" --show-depends "$module" | sed -n 's/^insmod //p'
    done | awk '!seen[$1]++' | while read -r path; do
        cp "$path" "$first/modules"
        basename "$path" >> "$first/modules/order"
    done
    printf '%s\n' "$version" > "$kept/.installed"
fi
version=$(cat "$kept/.installed")

[ $# -gt 0 ] || set -- sh -c '
    status=0
    $DELEGATED prorl-envs doctor || status=1
    $DELEGATED python -m pytest -p no:cacheprovider -n 0 --timeout 600 tests/sandbox/limits/test_limits.py \
        -k "cgroup2 and not python" || status=1
    exit $status'
words=
for word; do words="$words '$(printf '%s' "$word" | sed "s/'/'\\\\''/g")'"; done

python=$("$venv/bin/python" -c 'import sys; print(sys.base_prefix)')
cat > "$kept/first/command" <<END
stty -onlcr cols 120
cd '$checkout'
PATH="\$(realpath '$venv')/bin:\$PATH" HOME=/home/guest TMPDIR=/home/guest/tmp COLUMNS=120 PYTHONDONTWRITEBYTECODE=1
export PATH HOME TMPDIR COLUMNS PYTHONDONTWRITEBYTECODE
mkdir -p "\$TMPDIR"
export DELEGATED='systemd-run --user --scope --quiet -p Delegate=yes' # the service needs a scope without other processes
exec$words
END
cat > "$kept/first/init" <<END
#!/bin/busybox sh
b=/bin/busybox
\$b mkdir -p /proc /sys /dev /host /changes /all
\$b mount -t devtmpfs dev /dev
\$b mount -t proc proc /proc
for module in \$(\$b cat /modules/order); do \$b insmod "/modules/\$module"; done
\$b mount -t 9p -o ro,trans=virtio,version=9p2000.L,cache=loose,msize=512000 host /host
\$b mount -t tmpfs changes /changes
\$b mkdir /changes/files /changes/work
\$b mount -t overlay -o lowerdir=/host,upperdir=/changes/files,workdir=/changes/work all /all
\$b mkdir -p /all/lib/modules /all/home/guest /all/etc/systemd/system
\$b ln -sf '$kept/system/lib/modules/$version' /all/lib/modules/
\$b sed -i '/^[^:]*:[^:]*:4242:/d' /all/etc/passwd
echo 'guest:*:4242:4242::/home/guest:/bin/sh' >> /all/etc/passwd
echo 'guest:x:4242:' >> /all/etc/group
for folder in '$checkout' '$python' '$kept'; do # an ordinary user may not read root's folders
    while [ "\$folder" != / ]; do \$b chmod o+rx "/all\$folder"; folder=\$(\$b dirname "\$folder"); done
done
\$b cp /command /all/home/guest/command
echo 'tmpfs /home/guest/tmp tmpfs mode=1777 0 0' > /all/etc/fstab
units=/all/etc/systemd/system
\$b cp /guest.service \$units
\$b ln -sf /dev/null \$units/systemd-tmpfiles-setup.service # the service empties /tmp, which takes long
echo "guest:*:20000::::::" >> /all/etc/shadow
\$b chown -R 4242:4242 /all/home/guest
\$b rm -f /all/.dockerenv # with this file, systemd assumes that it runs in a container
exec \$b switch_root /all /sbin/init --unit=guest.service
END
cat > "$kept/first/guest.service" <<'END'
[Unit]
Requires=basic.target dbus.socket
After=basic.target dbus.socket user@4242.service home-guest-tmp.mount
Wants=user@4242.service home-guest-tmp.mount
SuccessAction=poweroff-force
FailureAction=poweroff-force
[Service]
Type=oneshot
User=guest
Environment=XDG_RUNTIME_DIR=/run/user/4242
StandardInput=tty-force
StandardOutput=tty
TTYPath=/dev/ttyS1
ExecStart=/bin/sh /home/guest/command
ExecStopPost=+/bin/sh -c 'echo "$EXIT_STATUS" > /dev/ttyS2'
END
chmod +x "$kept/first/init"
(cd "$kept/first" && find . | "$kept/system/bin/busybox" cpio -o -H newc 2>/dev/null | gzip -1 > "$kept/first.gz")

accel=${CGROUP2_ACCEL:-tcg} # kvm is not the default, because a /dev/kvm that can be opened does not always work
[ "$accel" = tcg ] && cpu=max || cpu=host
qemu-system-x86_64 -accel "$accel" -cpu "$cpu" -smp 2 -m 4G -nodefaults -no-user-config -display none -no-reboot \
    -kernel "$kept/system/boot/vmlinuz-$version" -initrd "$kept/first.gz" \
    -append "console=ttyS0 panic=-1 systemd.unified_cgroup_hierarchy=1" \
    -virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap \
    -device virtio-rng-pci \
    -serial "file:$kept/boot.log" -serial stdio -serial "file:$kept/status" < /dev/null &
qemu=$!
trap 'kill $qemu 2>/dev/null || :' EXIT
trap 'exit 1' INT TERM
wait $qemu
status=$(tr -d '\r\n' < "$kept/status")
[ -n "$status" ] || say "error: the virtual machine ended before the command did: $kept/boot.log"
exit "${status:-1}"
