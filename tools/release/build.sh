#!/bin/sh
# Makes an archive of the program for others: `tools/release/build.sh --help` says how.
set -eu

help() {
    cat <<'HELP'
Usage: tools/release/build.sh [--target TRIPLE] [--binary FILE] [--out DIR]

Builds the program, strips it, checks that it runs, and writes into DIR

  ferrum-VERSION-TRIPLE.tar.gz          the program, LICENSE, README.md, CHANGELOG.md, THIRD-PARTY-LICENSES.txt,
                                        completions for bash, zsh and fish, and the manual pages
  ferrum-VERSION-TRIPLE.tar.gz.sha256   its sum, for `sha256sum --check`

The same binary gives the same archive: files are sorted, owned by nobody in particular, and as old as the commit.

  --target TRIPLE   what to build for; this machine must run it [default: this machine]
  --binary FILE     take this program instead of building one
  --out DIR         [default: target/release-archives]

The program is linked against the C library of this machine, so build on the oldest system that it is meant for. A static
program needs a target with musl (`rustup target add x86_64-unknown-linux-musl`, and musl-gcc for the C code of
dependencies), and computes on the CPU only: Vulkan and CUDA are libraries that are opened at run time, which a static program
cannot do. That has not been tried.
HELP
}

fail() {
    echo "error: $1" >&2
    exit 1
}

root="$(cd "$(dirname "$0")/../.." && pwd)"
host="$(rustc -vV | sed -n 's/^host: //p')"
target="$host"
binary=
out="$root/target/release-archives"
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) help && exit 0 ;;
    --target | --binary | --out)
        [ $# -gt 1 ] || fail "$1 needs a value"
        case "$1" in
        --target) target="$2" ;;
        --binary) binary="$2" ;;
        --out) out="$2" ;;
        esac
        shift 2
        ;;
    *) fail "found $1, expected --target, --binary or --out" ;;
    esac
done

if [ -z "$binary" ]; then
    folder="$root/target/release"
    if [ "$target" = "$host" ]; then
        (cd "$root" && cargo build --release --locked --package ferrum-cli)
    else
        (cd "$root" && cargo build --release --locked --package ferrum-cli --target "$target")
        folder="$root/target/$target/release"
    fi
    binary="$folder/ferrum"
fi

scratch="$(mktemp -d)"
trap 'rm -r "$scratch"' EXIT
strip -o "$scratch/ferrum" "$binary"

# The stripped program runs, and the model inside it computes.
version="$("$scratch/ferrum" --version | sed -n '1s/^ferrum \([^ ]*\).*/\1/p')"
[ -n "$version" ] || fail "the program does not tell its version"
answer="$("$scratch/ferrum" run --backend cpu --temperature 0 --max-tokens 12 'What is 7 plus 5?')"
case "$answer" in
*12*) ;;
*) fail "the demo model says \"$answer\" to \"What is 7 plus 5?\"" ;;
esac

name="ferrum-$version-$target"
stage="$scratch/$name"
mkdir -p "$stage/completions" "$stage/man"
install -m 755 "$scratch/ferrum" "$stage/ferrum"
install -m 644 "$root/LICENSE" "$root/README.md" "$root/CHANGELOG.md" "$stage"
"$stage/ferrum" licenses --full >"$stage/THIRD-PARTY-LICENSES.txt"
"$stage/ferrum" completions bash >"$stage/completions/ferrum.bash"
"$stage/ferrum" completions zsh >"$stage/completions/_ferrum"
"$stage/ferrum" completions fish >"$stage/completions/ferrum.fish"
"$stage/ferrum" man "$stage/man"

time="$(git -C "$root" log -1 --format=%ct 2>/dev/null || echo 0)"
mkdir -p "$out"
tar -C "$scratch" --sort=name --owner=0 --group=0 --numeric-owner --mode=go-w --mtime="@$time" -cf - "$name" |
    gzip -n9 >"$out/$name.tar.gz"
(cd "$out" && sha256sum "$name.tar.gz" >"$name.tar.gz.sha256")
echo "$out/$name.tar.gz"
