#!/usr/bin/env bash
# Runs a static program in an emulated x86-64 machine and ends with its exit code: cargo's runner.
#
#   tools/emulate/guest.sh PROGRAM [ARGUMENT...]
#
# Bochs boots a Linux kernel whose only process is the program. If it speaks of fixtures, it finds those
# of the repository at their own path, and nothing else of this machine.
set -euo pipefail

repo=$(cd "$(dirname "$0")/../.." && pwd)
home=$repo/target/emulate
# The processor: every instruction set that the kernels know.
model=sapphire_rapids
# What kernels do not get on with in Bochs 3.0.
without="no5lvl nopku noxsaves clearcpuid=umip,fsrm,erms"

for file in "$home/bochs" "$home/kernel"; do
    if [ ! -e "$file" ]; then
        echo "there is no $file" >&2
        echo "hint: tools/emulate/README.md says how to make it" >&2
        exit 1
    fi
done

work=$(mktemp -d)
bochs=
finish() {
    if [ -n "$bochs" ]; then
        kill "$bochs" 2>/dev/null || true
    fi
    rm -rf "$work"
}
trap finish EXIT

# The guest's files: the program, what it reads, and a shell to start it with.
root=$work/root
mkdir -p "$root/bin" "$work/disc"
cp "$(command -v busybox)" "$root/bin/busybox"
strip -o "$root/program" "$1"
if grep -q fixtures "$root/program"; then
    mkdir -p "$root$repo"
    cp -r "$repo/fixtures" "$root$repo/"
fi
shift
{
    echo '#!/bin/busybox sh'
    echo 'b=/bin/busybox'
    echo '$b mkdir -p /proc /sys /dev /tmp'
    echo '$b mount -t proc none /proc'
    echo '$b mount -t sysfs none /sys'
    echo '$b mount -t devtmpfs none /dev'
    echo '$b mount -t tmpfs none /tmp'
    printf '/program'
    [ $# = 0 ] || printf ' %q' "$@"
    echo
    echo 'echo "guest ended: $?"'
    # Whoever reads the line above ends the machine.
    echo 'while :; do $b sleep 1000; done'
} >"$root/init"
chmod +x "$root/init"
(cd "$root" && find . | cpio --create --format=newc --quiet) >"$work/disc/files"

# A disc to boot from.
cp "$home/kernel" "$work/disc/kernel"
install -m 644 /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 "$work/disc/"
cat >"$work/disc/isolinux.cfg" <<END
default guest
label guest
 kernel kernel
 append initrd=files console=ttyS0 quiet nokaslr mitigations=off random.trust_cpu=on init_on_alloc=0 $without
END
genisoimage -quiet -o "$work/disc.iso" -b isolinux.bin -c boot.cat -no-emul-boot \
    -boot-load-size 4 -boot-info-table "$work/disc"

cat >"$work/bochsrc" <<END
display_library: nogui
memory: guest=1024, host=1024
cpu: model=$model, count=1, ips=50000000, reset_on_triple_fault=0
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/vgabios/vgabios.bin
ata0: enabled=1
ata0-master: type=cdrom, path=$work/disc.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$work/serial
log: $work/log
panic: action=fatal
error: action=ignore
info: action=ignore
debug: action=ignore
clock: sync=none
END
: >"$work/serial"
"$home/bochs" -q -f "$work/bochsrc" >"$work/out" 2>&1 </dev/null &
bochs=$!

# What the guest says, until its program has ended or the machine has.
tail --follow --lines=+1 --pid="$bochs" --sleep-interval=0.2 "$work/serial" |
    while IFS= read -r line; do
        line=${line%$'\r'}
        if [ "${line#guest ended: }" != "$line" ]; then
            echo "${line#guest ended: }" >"$work/code"
            kill "$bochs"
            break
        fi
        printf '%s\n' "$line"
    done || true

if [ ! -e "$work/code" ]; then
    echo "the emulated machine stopped:" >&2
    tail -n 20 "$work/out" "$work/log" >&2 || true
    exit 1
fi
exit "$(cat "$work/code")"
