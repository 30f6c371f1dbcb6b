#!/usr/bin/env bash
# `cargo test` in an emulated processor with AVX-512 (BF16 too) and AVX-VNNI: see README.md beside this.
#
#   tools/emulate/x86.sh [what cargo test takes]
set -euo pipefail
cd "$(dirname "$0")/../.."

target=x86_64-unknown-linux-musl
export CARGO_TARGET_X86_64_UNKNOWN_LINUX_MUSL_RUNNER="$PWD/tools/emulate/guest.sh"
exec cargo test --release --target $target "$@"
