#!/usr/bin/env bash
# Makes what x86.sh needs, in target/emulate: Bochs, from its sources, and a kernel, from Debian.
#
#   tools/emulate/setup.sh FOLDER      the unpacked sources of Bochs 3.0
set -euo pipefail
source=$(cd "$1" && pwd)
cd "$(dirname "$0")/../.."
home=$PWD/target/emulate
mkdir -p "$home"

if [ ! -e "$home/bochs" ]; then
    work=$(mktemp -d)
    cp -r "$source/." "$work"
    (
        cd "$work"
        # Bochs 3.0 scales the offset of this instruction's operand in memory as if that were one number.
        sed -i '/"vdpbf16ps"/s/OP_mVdq32/OP_mVdq/' cpu/decoder/ia_opcodes_evex.def
        ./configure --enable-x86-64 --enable-cpu-level=6 --enable-avx --enable-evex \
            --enable-all-optimizations --enable-long-phy-address --disable-large-ramfile \
            --disable-docbook --with-nogui
        make -j"$(nproc)"
    )
    cp "$work/bochs" "$home/bochs"
    rm -r "$work"
fi

if [ ! -e "$home/kernel" ]; then
    work=$(mktemp -d)
    chmod 755 "$work"
    package=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends:/ { print $2; exit }')
    (cd "$work" && apt-get download "$package" && dpkg-deb -x ./*.deb files)
    cp "$work"/files/boot/vmlinuz-* "$home/kernel"
    rm -r "$work"
fi
