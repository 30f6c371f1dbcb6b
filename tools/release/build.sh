#!/bin/sh
# Makes an archive of the program for others: `tools/release/build.sh --help` says how.
set -eu

help() {
    cat <<'HELP'
Usage: tools/release/build.sh [--target TRIPLE] [--run-with COMMAND] [--static] [--binary FILE] [--out DIR]

Builds the program, strips it, checks that it runs, and writes into DIR

  ferrum-VERSION-TRIPLE.tar.gz          the program, LICENSE, README.md, CHANGELOG.md, THIRD-PARTY-LICENSES.txt,
                                        completions for bash, zsh and fish, and the manual pages
  ferrum-VERSION-TRIPLE.tar.gz.sha256   its sum, for `sha256sum --check`

The same binary gives the same archive: files are sorted, owned by nobody in particular, and as old as the commit.

  --target TRIPLE   what to build for [default: this machine]. For another processor it needs a cross compiler, such as
                    gcc-aarch64-linux-gnu for aarch64-unknown-linux-gnu; CARGO_TARGET_…_LINKER and STRIP name other ones
  --run-with COMMAND
                    what runs its programs here, such as "qemu-aarch64 -L /usr/aarch64-linux-gnu": the program itself
                    writes the completions, manual pages and licences of its archive
  --static          link the C library into the program, which then computes on the CPU only: Vulkan and CUDA are
                    libraries that are opened at run time. The archive's name ends in -static
  --binary FILE     take this program instead of building one
  --out DIR         [default: target/release-archives]

Without --static, the program is linked against the C library of this machine, so build on the oldest system that it is
meant for. With it, a program for a -gnu target runs anywhere but resolves names of hosts (ferrum pull) only where this
version of glibc is installed. A -musl target has no such limit; it needs `rustup target add x86_64-unknown-linux-musl`, and
musl-gcc for the C code of dependencies, and has not been tried.
HELP
}

fail() {
    echo "error: $1" >&2
    exit 1
}

root="$(cd "$(dirname "$0")/../.." && pwd)"
host="$(rustc -vV | sed -n 's/^host: //p')"
target="$host"
run_with=
static=
binary=
out="$root/target/release-archives"
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) help && exit 0 ;;
    --static) static=yes && shift ;;
    --target | --run-with | --binary | --out)
        [ $# -gt 1 ] || fail "$1 needs a value"
        case "$1" in
        --target) target="$2" ;;
        --run-with) run_with="$2" ;;
        --binary) binary="$2" ;;
        --out) out="$2" ;;
        esac
        shift 2
        ;;
    *) fail "found $1, expected --target, --run-with, --static, --binary or --out" ;;
    esac
done

# Names of a processor's tools are those of Debian's packages.
strip="${STRIP:-strip}"
if [ "${target%%-*}" != "${host%%-*}" ]; then
    strip="${STRIP:-${target%%-*}-linux-gnu-strip}"
    linker="CARGO_TARGET_$(echo "$target" | tr 'a-z-' 'A-Z_')_LINKER"
    [ -n "$binary" ] || export "$linker=$(printenv "$linker" || echo "${target%%-*}-linux-gnu-gcc")"
fi

if [ -z "$binary" ]; then
    set -- cargo build --release --locked --package ferrum-cli
    folder="$root/target"
    if [ -n "$static" ]; then
        # With a target, procedural macros and build scripts, which are libraries and programs of this machine, are not static.
        folder="$root/target/static"
        set -- "$@" --no-default-features --target-dir "$folder" --target "$target"
        RUSTFLAGS="${RUSTFLAGS:-} -C target-feature=+crt-static"
        export RUSTFLAGS
        folder="$folder/$target"
    elif [ "$target" != "$host" ]; then
        set -- "$@" --target "$target"
        folder="$folder/$target"
    fi
    (cd "$root" && "$@")
    binary="$folder/release/ferrum"
fi

scratch="$(mktemp -d)"
trap 'rm -r "$scratch"' EXIT
"$strip" -o "$scratch/ferrum" "$binary"

# The stripped program, which may need another one to run here.
ferrum() {
    # shellcheck disable=SC2086 # a command and its arguments
    $run_with "$scratch/ferrum" "$@"
}

# Check that the program runs, and that the model inside it computes.
version="$(ferrum --version | sed -n '1s/^ferrum \([^ ]*\).*/\1/p')"
[ -n "$version" ] || fail "the program does not tell its version
hint: --run-with names what runs it, where this is another processor"
answer="$(ferrum run --backend cpu --temperature 0 --max-tokens 12 'What is 7 plus 5?')"
case "$answer" in
*12*) ;;
*) fail "the demo model says \"$answer\" to \"What is 7 plus 5?\"" ;;
esac

name="ferrum-$version-$target${static:+-static}"
stage="$scratch/$name"
mkdir -p "$stage/completions" "$stage/man"
install -m 755 "$scratch/ferrum" "$stage/ferrum"
install -m 644 "$root/LICENSE" "$root/README.md" "$root/CHANGELOG.md" "$stage"
ferrum licenses --full >"$stage/THIRD-PARTY-LICENSES.txt"
ferrum completions bash >"$stage/completions/ferrum.bash"
ferrum completions zsh >"$stage/completions/_ferrum"
ferrum completions fish >"$stage/completions/ferrum.fish"
ferrum man "$stage/man"

time="$(git -C "$root" log -1 --format=%ct 2>/dev/null || echo 0)"
mkdir -p "$out"
tar -C "$scratch" --sort=name --owner=0 --group=0 --numeric-owner --mode=go-w --mtime="@$time" -cf - "$name" |
    gzip -n9 >"$out/$name.tar.gz"
(cd "$out" && sha256sum "$name.tar.gz" >"$name.tar.gz.sha256")
echo "$out/$name.tar.gz"
