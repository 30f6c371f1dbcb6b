#!/usr/bin/env bash
# Runs a fuzz target: tools/fuzz.sh TARGET [SECONDS] [SANITIZER] [OPTIONS OF LIBFUZZER].
#
# Needs cargo-fuzz (`cargo install cargo-fuzz --locked`) and a nightly compiler. Without one, RUSTC_BOOTSTRAP=1 has the stable one
# take the flags, and FUZZ_TOOLCHAIN=stable chooses it. Inputs that reach something new go to fuzz/corpus/TARGET, beside the seeds
# of fuzz/seeds; what fails goes to fuzz/artifacts/TARGET.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${1:?usage: tools/fuzz.sh TARGET [SECONDS] [SANITIZER]}
seconds=${2:-60}
sanitizer=${3:-address}
shift $(($# < 3 ? $# : 3))

# These have the engine behind them, which the others are built without.
features=()
case $target in
gbnf | request | toml | tool_calls) features=(--features engine) ;;
esac

# Some write files for each input.
if [ -z "${TMPDIR:-}" ] && [ -w /dev/shm ]; then
    export TMPDIR=/dev/shm
fi

options=(-max_total_time="$seconds" -rss_limit_mb=4096 -timeout=10)
if [ -f "fuzz/dictionaries/$target.dict" ]; then
    options+=(-dict="fuzz/dictionaries/$target.dict")
fi
corpora=("fuzz/corpus/$target")
mkdir -p "${corpora[0]}"
if [ -d "fuzz/seeds/$target" ]; then
    corpora+=("fuzz/seeds/$target")
fi
exec cargo "+${FUZZ_TOOLCHAIN:-nightly}" fuzz run --sanitizer "$sanitizer" "${features[@]}" "$target" "${corpora[@]}" -- "${options[@]}" "$@"
