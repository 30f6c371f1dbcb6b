"""Reports of what a device has computed: which card, which driver, when, by which commit.

    python tools/device/report.py conformance            # every op against its meaning
    python tools/device/report.py parity                 # a model of each family, layer by layer, against the reference
    python tools/device/report.py bench MODEL...         # speed, as shares of what the device can do
    python tools/device/report.py sanitizer              # conformance under NVIDIA's compute-sanitizer

Each writes a file into docs/reports/ and prints its path; the exit status is 1 where something failed. `--backend` takes another
backend than cuda, `--ferrum` another program than target/release/ferrum. Software devices are reported as such.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The checks of compute-sanitizer: accesses, races in shared memory, reads of what nothing has written, barriers.
TOOLS = ["memcheck", "racecheck", "initcheck", "synccheck"]
# Lines of a check's errors that a report keeps: enough for the first few with their places.
FIRST_LINES = 60


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def parsed(command: list[str]) -> tuple[object, int]:
    """What a command prints as JSON, and its exit status."""
    done = run(command)
    try:
        return json.loads(done.stdout), done.returncode
    except json.JSONDecodeError:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}") from None


def device_of(a: argparse.Namespace) -> dict[str, object]:
    devices, _ = parsed([a.ferrum, "devices", "--json"])
    for device in devices:
        if device["backend"] == a.backend and device["device"] == a.device:
            return device
    raise SystemExit(f"there is no {a.backend} device number {a.device}\nhint: `{a.ferrum} devices` lists what there is")


def commit() -> str:
    found = run(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip()
    changed = run(["git", "status", "--porcelain", "--untracked-files=no"]).stdout.strip()
    return f"{found}, with changes" if changed else found


def table(head: list[str], rows: list[list[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def conformance(a: argparse.Namespace) -> tuple[str, bool]:
    cases, _ = parsed([a.ferrum, "verify", "ops", *a.on, "--json"])
    counts: dict[tuple[str, str], Counter[str]] = {}
    worst: dict[tuple[str, str], float] = {}
    failures = []
    for case in cases:
        key = case["op"], case["dtype"]
        counts.setdefault(key, Counter())[case["outcome"]] += 1
        worst[key] = max(worst.get(key, 0.0), case.get("nmse") or 0.0)
        if case["outcome"] == "failed":
            failures.append(f"- {case['op']} {case['dtype']} {case['name']}: {case.get('reason', '')}")
    rows = [
        [op, dtype, found["passed"], found["failed"], found["skipped"], f"{worst[op, dtype]:.1e}"]
        for (op, dtype), found in counts.items()
    ]
    total = sum(counts.values(), Counter())
    summary = f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped."
    text = table(["op", "dtype", "passed", "failed", "skipped", "worst NMSE"], rows)
    return "\n\n".join([summary, *failures, text]), not failures


def parity(a: argparse.Namespace) -> tuple[str, bool]:
    rows, good, families = [], True, set()
    for folder in sorted((ROOT / "fixtures/models").iterdir()):
        family = json.loads((folder / "config.json").read_text())["model_type"]
        if family in families:
            continue
        families.add(family)
        done = run([a.ferrum, "verify", "model", str(folder), *a.on, "--json"])
        good &= done.returncode == 0
        try:
            found = json.loads(done.stdout)
        except json.JSONDecodeError:
            rows.append([family, folder.name, done.stderr.strip().splitlines()[0], "", "", "fails"])
            continue
        verdict = "agrees" if done.returncode == 0 else f"diverges at layer {found['first_diverging']}"
        worst = max(layer["relative"] for layer in found["layers"])
        rows.append([family, folder.name, f"{worst:.1e}", f"{found['kl']:.1e}", f"{100 * found['top1']:.1f} %", verdict])
    head = ["family", "fixture", "largest difference of a layer", "KL", "best token the same", ""]
    return table(head, rows), good


def bench(a: argparse.Namespace) -> tuple[str, bool]:
    if not a.models:
        raise SystemExit("bench: expected a model or several")
    parts = []
    for model in a.models:
        command = [a.ferrum, "bench", model, *a.on]
        done = run(command)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
        parts.append(f"## {Path(model).name}\n\n```text\n{done.stdout.rstrip()}\n```")
    return "\n\n".join(parts), True


def sanitizer(a: argparse.Namespace) -> tuple[str, bool]:
    program = shutil.which("compute-sanitizer")
    if not program:
        raise SystemExit("compute-sanitizer is not here\nhint: it is part of the CUDA toolkit")
    rows, errors, good = [], [], True
    for tool in TOOLS:
        command = [program, "--tool", tool, "--error-exitcode", "7", a.ferrum, "verify", "ops", *a.on]
        done = run(command)
        summary = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", done.stdout + done.stderr)
        good &= done.returncode == 0
        rows.append([tool, summary[-1] if summary else "no summary", done.returncode])
        if done.returncode:
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("=====")]
            errors.append(f"## What {tool} found first\n\n```text\n" + "\n".join(lines[:FIRST_LINES]) + "\n```")
    return "\n\n".join([table(["check", "what it says", "exit status"], rows), *errors]), good


def main() -> int:
    kinds = {"conformance": conformance, "parity": parity, "bench": bench, "sanitizer": sanitizer}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("models", nargs="*", help="for bench")
    parser.add_argument("--ferrum", default=str(ROOT / "target/release/ferrum"))
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/reports", help="folder for the report")
    a = parser.parse_args()
    a.on = ["--backend", a.backend, *(["--device", str(a.device)] if a.device else [])]
    device = device_of(a)
    other = [] if a.backend == "cuda" else ["--backend", a.backend]
    text, good = kinds[a.kind](a)
    today = datetime.date.today().isoformat()
    software = " (software: no figure of it says anything about a card)" if device["software"] else ""
    head = [
        f"# {a.kind.capitalize()} on {device['name']}",
        table(
            ["", ""],
            [
                ["device", f"{device['name']}{software}"],
                ["driver", device["detail"]],
                ["date", today],
                ["commit", commit()],
                ["command", f"`python tools/device/report.py {' '.join([a.kind, *a.models, *other])}`"],
            ],
        ),
    ]
    name = re.sub(r"[^a-z0-9]+", "-", str(device["name"]).lower()).strip("-")
    a.out.mkdir(parents=True, exist_ok=True)
    path = a.out / f"{today}-{a.backend}-{name}-{a.kind}.md"
    path.write_text("\n\n".join([*head, text]) + "\n")
    print(path)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
