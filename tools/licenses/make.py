#!/usr/bin/env python3
"""Lists the third-party code of the binary with its licences: `ferrum licenses` prints what this writes.

    python3 tools/licenses/make.py           # writes crates/ferrum-cli/src/licenses/
    python3 tools/licenses/make.py --check   # fails if what is there is out of date

Reads `cargo metadata` of the locked versions, with the feature `mpi` and for all targets, and the licence files of the
crates, so cargo must be able to fetch them. `packages.tsv` has every package of Cargo.lock that is not ours, in the order of
that file: name, version, licence (SPDX) and use, which is `binary` for what the program is linked from and `build` for
procedural macros, build scripts and tests; at its end the libraries of the chat page, whose use is `page`.
`ferrum-cli/tests/licenses.rs` holds it against Cargo.lock. `texts.txt` has
the licences of what is in the binary. Where a crate may be had under Apache-2.0, that is what it is used under, so its
text stands once for all of them; other texts stand once for all crates with the same one.
"""

import argparse
import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "crates/ferrum-cli/src/licenses"
VENDOR = ROOT / "crates/ferrum-server/src/page/vendor"

# What is in the binary without being a crate: name, version, licence, file of its text.
OTHERS = [
    ("highlight.js", "11.12.0", "BSD-3-Clause", VENDOR / "highlight.LICENSE"),
    ("temml", "0.13.5", "MIT", VENDOR / "temml.LICENSE"),
]

LICENCE_FILE = re.compile(r"^(un)?licen[cs]e|^copying|^copyright|^notice", re.I)


def metadata():
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--features", "ferrum-cli/mpi"]
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)


def linked(data):
    """Ids of what the program is linked from: normal dependencies of `ferrum-cli`, procedural macros apart."""
    packages = {package["id"]: package for package in data["packages"]}
    nodes = {node["id"]: node for node in data["resolve"]["nodes"]}
    todo = [package["id"] for package in data["packages"] if package["name"] == "ferrum-cli"]
    found = set()
    while todo:
        one = todo.pop()
        macros = any("proc-macro" in target["kind"] for target in packages[one]["targets"])
        if one in found or macros:
            continue
        found.add(one)
        for dep in nodes[one]["deps"]:
            if any(kind["kind"] is None for kind in dep["dep_kinds"]):
                todo.append(dep["pkg"])
    return found


def spdx(package):
    """The licence as an SPDX expression: some older crates have a slash for `OR`."""
    return re.sub(r"\s*/\s*", " OR ", package["license"] or "see its files")


def plain(text):
    """What two texts have in common if they differ in nothing but their layout."""
    return " ".join(text.split())


def read(path):
    text = path.read_bytes().decode("utf-8", "replace").replace("\r\n", "\n").replace("\f", "\n")
    lines = [line.rstrip() for line in text.strip("\n").split("\n")]
    return "\n".join(lines).strip() + "\n"


def texts_of(package):
    """Licence files of a crate, and those of what it was taken from, one folder down."""
    folder = Path(package["manifest_path"]).parent
    files = [path for path in sorted(folder.iterdir()) if LICENCE_FILE.match(path.name)]
    nested = [sorted(path.iterdir()) for path in files if path.is_dir()]
    files = [path for path in files if path.is_file()] + [path for paths in nested for path in paths]
    return [(path.name, read(path)) for path in files if path.suffix not in {".rs", ".spdx"}]


def is_apache(text):
    start = plain(text)[:400]
    return "Apache License" in start and "Version 2.0" in start and "TERMS AND CONDITIONS" in plain(text)


def list_packages(data):
    binary = linked(data)
    rows = []
    for package in data["packages"]:
        if package["source"]:
            use = "binary" if package["id"] in binary else "build"
            rows.append((package["name"], package["version"], spdx(package), use))
    rows += [(name, version, licence, "page") for name, version, licence, _ in OTHERS]
    return "".join("\t".join(row) + "\n" for row in rows)


def list_texts(data):
    apache = read(ROOT / "LICENSE")
    users = defaultdict(list)
    texts = {plain(apache): apache}
    users[plain(apache)].append("the standard library of Rust")
    without = []

    def use(text, name):
        key = plain(apache) if is_apache(text) else plain(text)
        texts.setdefault(key, text)
        if name not in users[key]:
            users[key].append(name)

    binary = linked(data)
    for package in data["packages"]:
        if not package["source"] or package["id"] not in binary:
            continue
        name = f"{package['name']} {package['version']}"
        licence = spdx(package)
        files = texts_of(package)
        # `A OR B`: ours to choose. Anything with `AND` gives all of its files.
        choice = "Apache-2.0" in re.split(r" OR ", licence)
        if choice:
            use(apache, name)
            files = [(file, text) for file, text in files if file.lower().startswith("notice")]
        elif not files:
            without.append(f"{name}: {licence}")
        for _, text in files:
            use(text, name)
    for name, version, _, path in OTHERS:
        use(read(path), f"{name} {version}")
    out = "Licences of the third-party code in this program. The source of each crate is where Cargo.lock says.\n"
    rule = "\n" + "-" * 80 + "\n"
    for key in sorted(users, key=lambda key: (-len(users[key]), users[key][0])):
        out += f"{rule}{', '.join(users[key])}\n\n{texts[key]}"
    if without:
        out += f"{rule}Without a file of their licence\n\n" + "".join(line + "\n" for line in without)
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the files are out of date")
    check = parser.parse_args().check
    data = metadata()
    data["packages"].sort(key=lambda package: (package["name"], package["version"]))
    old = []
    for name, text in [("packages.tsv", list_packages(data)), ("texts.txt", list_texts(data))]:
        path = OUT / name
        if check and (not path.exists() or path.read_text() != text):
            old.append(str(path.relative_to(ROOT)))
        elif not check:
            OUT.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if old:
        sys.exit(f"out of date: {', '.join(old)}; run python3 tools/licenses/make.py")


main()
