#!/usr/bin/env bash
# Runs unsafe code that is not a kernel's under Miri, which looks at each load and store: tools/miri.sh [quant|pool]...
#
# Needs a nightly compiler with the components miri and rust-src. Vectors of ferrum-quant are those of AVX2: Miri does not know
# what AVX-512 does. The thread pool runs in the orders that each of several seeds gives.
set -euo pipefail
cd "$(dirname "$0")/.."

[ $# -gt 0 ] || set -- quant pool
for what in "$@"; do
    case "$what" in
    quant)
        RUSTFLAGS="${RUSTFLAGS:-} -C target-feature=+avx2,+fma" MIRIFLAGS="${MIRIFLAGS:-}" \
            cargo +nightly miri test --package ferrum-quant --lib --locked -- the_instruction_set_changes_no_byte
        ;;
    pool)
        # Workers that wait look at the time of the machine.
        MIRIFLAGS="${MIRIFLAGS:-} -Zmiri-disable-isolation -Zmiri-many-seeds=0..8" \
            cargo +nightly miri test --package ferrum-simd --test simd --locked -- pool::
        ;;
    *)
        echo "error: found $what, expected quant or pool" >&2
        exit 1
        ;;
    esac
done
