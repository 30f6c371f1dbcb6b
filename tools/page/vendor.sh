#!/bin/sh
# Takes the two libraries of the chat page from the npm registry, as their makers released them:
# `tools/page/vendor.sh` from anywhere. Needs npm, tar and sha256sum.
#
# A file with another hash than the one that is pinned here is not taken. To move to a newer release,
# change the version, run this, look at what changed, and pin the hash that it names.
set -eu

vendor="$(cd "$(dirname "$0")/../.." && pwd)/crates/ferrum-server/src/page/vendor"
scratch="$(mktemp -d)"
trap 'rm -r "$scratch"' EXIT

# take PACKAGE@VERSION FILE HASH NAME: one file of a package, under a name in the folder.
take() {
    folder="$scratch/$(printf '%s' "$1" | tr '/@' '__')"
    if [ ! -d "$folder" ]; then
        mkdir "$folder"
        (cd "$folder" && npm pack --silent "$1" >/dev/null && tar xzf ./*.tgz)
    fi
    found="$(sha256sum "$folder/package/$2" | cut -d ' ' -f 1)"
    if [ "$found" != "$3" ]; then
        echo "error: $1/$2: found sha256 $found, expected $3" >&2
        exit 1
    fi
    install -m 644 "$folder/package/$2" "$vendor/$4"
}

temml=temml@0.13.5
highlight=@highlightjs/cdn-assets@11.12.0
mkdir -p "$vendor"
take $temml dist/temml.min.js 1ab19148afe0dbc836b7a74f344071b3f3a70a7a8259ae4049e76894fcdf8d95 temml.min.js
take $temml LICENSE 12b4e5592a12baaf50637881f2cb9d66667b26b8d51a73cd8f0d6bcefe176ab6 temml.LICENSE
take $highlight highlight.min.js 8ab71eb09c51f501e5e25157d9cff100e46cc29bcbfc744d0b746d451fca7f53 highlight.min.js
take $highlight LICENSE 6c081431591d9df696c82dc598fe1423765b8a299b200ed00b281afd0f64c490 highlight.LICENSE
