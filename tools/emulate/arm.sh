#!/usr/bin/env bash
# `cargo test` in an emulated aarch64 processor: see README.md beside this.
#
#   tools/emulate/arm.sh [what cargo test takes]
set -euo pipefail
cd "$(dirname "$0")/../.."

target=aarch64-unknown-linux-gnu
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu max"
exec cargo test --release --target $target "$@"
