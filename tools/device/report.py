"""Reports of what a device has computed: which card, which driver, when, by which commit.

    python tools/device/report.py conformance            # every op against its meaning
    python tools/device/report.py parity                 # a model of each family, layer by layer, against the reference
    python tools/device/report.py bench MODEL...         # speed, as shares of what the device can do
    python tools/device/report.py sanitizer              # conformance under NVIDIA's compute-sanitizer

Each writes a file into docs/reports/ and prints its path; the exit status is 1 where something failed. `--backend` takes another
backend than cuda, `--ferrum` another program than target/release/ferrum, and `--filter` a part of the names of ops or fixtures. What
follows a -- are flags of the program's command, such as `bench MODEL -- --prompt 4096`. On CUDA, conformance and parity are of
activations of bf16 and of f16, bench and sanitizer of bf16. Software devices are reported as such.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# The checks of compute-sanitizer: accesses, races in shared memory, reads of what nothing has written, barriers.
TOOLS = ["memcheck", "racecheck", "initcheck", "synccheck"]
# Lines of a check's errors that a report keeps: enough for the first few with their places.
FIRST_LINES = 60
# What `--activations` takes, for the backends that have the choice. All others compute in f32 and refuse it.
ACTIVATIONS = {"cuda": ["bf16", "f16"]}
# The text of a report, and whether nothing failed.
Found = tuple[str, bool]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise SystemExit(f"{command[0]} is not here\nhint: `cargo build --release` makes the program") from None


def parsed(done: subprocess.CompletedProcess[str]) -> Any:
    """What a command has printed as JSON; nothing where it printed none."""
    try:
        return json.loads(done.stdout)
    except json.JSONDecodeError:
        return None


def device_of(a: argparse.Namespace) -> dict[str, Any]:
    done = run([a.ferrum, "devices", "--json"])
    devices = parsed(done)
    if devices is None:
        raise SystemExit(f"{a.ferrum} devices: {failure_text(done)}")
    for device in devices:
        if device["backend"] == a.backend and device["device"] == a.device:
            return device
    raise SystemExit(f"there is no {a.backend} device number {a.device}\nhint: `{a.ferrum} devices` lists what there is")


def commit(a: argparse.Namespace) -> str:
    """The commit that the program is built from, which need not be the one that is checked out."""
    head = run(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]).stdout.strip()
    version = re.search(r"^commit +(\S+)$", run([a.ferrum, "--version"]).stdout, re.MULTILINE)
    found = version[1] if version else "unknown"
    changed = found == head and run(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no"]).stdout.strip()
    return f"{found}, with changes" if changed else found


def memory(device: dict[str, Any]) -> str:
    free, total = device["free_memory_bytes"], device["memory_bytes"]
    return "not known" if total is None else f"{free / 2**30:.1f} GiB of {total / 2**30:.1f} GiB free"


def table(head: list[str], rows: list[list[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(one_line(cell) for cell in line)} |" for line in lines)


def one_line(text: object) -> str:
    """Text for a cell or an item of a list, which end with their line."""
    return " ".join(str(text).split()).replace("|", "\\|")


def number(value: float | None) -> str:
    """A number of the program's JSON, which has null for what is not finite."""
    return "not finite" if value is None else f"{value:.1e}"


def failure_text(done: subprocess.CompletedProcess[str]) -> str:
    """Why a command failed, as it says itself; one that a signal has ended may have said nothing."""
    return done.stderr.strip() or done.stdout.strip()[-300:] or f"exit status {done.returncode}"


def of_each_activations(a: argparse.Namespace, report: Callable[[argparse.Namespace, list[str]], Found]) -> Found:
    """A report for each element that the backend's activations may have."""
    kinds = ACTIVATIONS.get(a.backend)
    if kinds is None:
        return report(a, [])
    parts, good = [], True
    for kind in kinds:
        text, fine = report(a, ["--activations", kind])
        parts.append(f"## Activations of {kind}\n\n{text}")
        good &= fine
    return "\n\n".join(parts), good


def conformance(a: argparse.Namespace, activations: list[str]) -> Found:
    done = run([a.ferrum, "verify", "ops", *a.on, *activations, *a.ops, *a.flags, "--json"])
    cases = parsed(done)
    if cases is None:
        return f"No results: {one_line(failure_text(done))}", False
    counts: dict[tuple[str, str], Counter[str]] = {}
    worst: dict[tuple[str, str], float] = {}
    failures, skips = [], Counter()
    for case in cases:
        key = case["op"], case["dtype"]
        counts.setdefault(key, Counter())[case["outcome"]] += 1
        if case["outcome"] == "passed":
            worst[key] = max(worst.get(key, 0.0), case["nmse"])
        elif case["outcome"] == "failed":
            failures.append(f"- {case['op']} {case['dtype']} {case['name']}: {one_line(case['reason'])}")
        else:
            skips[one_line(case["reason"])] += 1
    rows = [
        [op, dtype, found["passed"], found["failed"], found["skipped"], number(worst[op, dtype]) if found["passed"] else "-"]
        for (op, dtype), found in counts.items()
    ]
    total = sum(counts.values(), Counter())
    summary = f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped."
    skipped = [f"- {count} skipped: {reason}" for reason, count in skips.items()]
    text = table(["op", "dtype", "passed", "failed", "skipped", "worst NMSE"], rows)
    return "\n\n".join([summary, *(["\n".join([*failures, *skipped])] if failures or skipped else []), text]), not failures


def fixtures(part: str) -> dict[str, Path]:
    """A fixture of each family: the first whose name has `part`."""
    families: dict[str, Path] = {}
    for folder in sorted((ROOT / "fixtures/models").iterdir()):
        if part in folder.name:
            families.setdefault(json.loads((folder / "config.json").read_text())["model_type"], folder)
    if not families:
        raise SystemExit(f'no fixture has "{part}" in its name')
    return families


def parity(a: argparse.Namespace, activations: list[str]) -> Found:
    rows, good = [], True
    for family, folder in fixtures(a.filter).items():
        done = run([a.ferrum, "verify", "model", str(folder), *a.on, *activations, *a.flags, "--json"])
        good &= done.returncode == 0
        found = parsed(done)
        if found is None:
            rows.append([family, folder.name, "", "", "", "", f"fails: {failure_text(done)}"])
            continue
        layers = [layer["relative"] for layer in found["layers"]]
        worst = None if None in layers else max(layers, default=0.0)
        first = found["first_diverging_layer"]
        diverges = "logits diverge, no layer" if first is None else f"diverges at layer {first}"
        verdict = "agrees" if found["agrees"] else f"{diverges}: more than {found['tolerance']}"
        rest = [number(found["logits"]["relative"]), number(found["kl"]), f"{100 * found['top1']:.1f} %", verdict]
        rows.append([family, folder.name, number(worst), *rest])
    agree = sum(row[-1] == "agrees" for row in rows)
    head = ["family", "fixture", "largest difference of a layer", "of logits", "KL", "best token the same", ""]
    return f"{agree} of {len(rows)} families agree.\n\n{table(head, rows)}", good


def bench(a: argparse.Namespace) -> Found:
    if not a.models:
        raise SystemExit("bench: expected a model or several")
    parts, good = [], True
    for model in a.models:
        done = run([a.ferrum, "bench", model, *a.on, *a.flags])
        good &= done.returncode == 0
        text = failure_text(done) if done.returncode else done.stdout.rstrip()
        parts.append(f"## {Path(model).name}\n\n```text\n{text}\n```")
    return "\n\n".join(parts), good


def sanitizer(a: argparse.Namespace) -> Found:
    program = shutil.which("compute-sanitizer")
    if not program:
        raise SystemExit("compute-sanitizer is not here\nhint: it is part of the CUDA toolkit")
    rows, errors, good = [], [], True
    for tool in TOOLS:
        command = [program, "--tool", tool, "--error-exitcode", "7", a.ferrum, "verify", "ops", *a.on, *a.ops, *a.flags]
        done = run(command)
        said = (done.stdout + done.stderr).splitlines()
        summary = next((line.strip("= ") for line in reversed(said) if re.search(r"(?:ERROR|RACECHECK) SUMMARY: ", line)), "no summary")
        # Hazards that are only warnings leave the exit status at 0, and so may a program in which it saw no kernel.
        fine = done.returncode == 0 and " SUMMARY: 0 " in summary
        good &= fine
        rows.append([tool, summary, done.returncode])
        if not fine:
            # What it has found; where it has found nothing, the program failed, which says why at the end.
            none = summary == "no summary" or " SUMMARY: 0 " in summary
            lines = said[-FIRST_LINES:] if none else [line for line in said if line.startswith("=====")][:FIRST_LINES]
            errors.append(f"## {tool}\n\n```text\n" + "\n".join(lines) + "\n```")
    return "\n\n".join([table(["check", "what it says", "exit status"], rows), *errors]), good


def command_line(a: argparse.Namespace) -> str:
    """How to make this report again."""
    settings = {"--backend": a.backend if a.backend != "cuda" else "", "--device": a.device, "--filter": a.filter}
    words = [word for name, value in settings.items() if value for word in (name, str(value))]
    flags = ["--", *a.flags] if a.flags else []
    return shlex.join(["python", "tools/device/report.py", a.kind, *a.models, *words, *flags])


def main() -> int:
    kinds = {
        "conformance": lambda a: of_each_activations(a, conformance),
        "parity": lambda a: of_each_activations(a, parity),
        "bench": bench,
        "sanitizer": sanitizer,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("models", nargs="*", help="for bench")
    parser.add_argument("--ferrum", default=str(ROOT / "target/release/ferrum"))
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--filter", default="", help="only ops, or for parity fixtures, whose name has this")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/reports", help="folder for the report")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    a = parser.parse_args(sys.argv[1:end])
    a.flags = sys.argv[end + 1 :]
    a.on = ["--backend", a.backend, *(["--device", str(a.device)] if a.device else [])]
    a.ops = ["--filter", a.filter] if a.filter else []
    device = device_of(a)
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
                ["memory", memory(device)],
                ["date", today],
                ["commit", commit(a)],
                ["command", f"`{command_line(a)}`"],
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
