#!/usr/bin/env python3
"""Resident memory of the weights of each rank, beside those of one process.

    python3 tools/models/make_random_model.py qwen3-0.6b /tmp/qwen3.gguf --format gguf --dtype q8_0
    python3 tools/models/make_random_model.py qwen3-0.6b-thin /tmp/thin.gguf --format gguf --dtype q8_0
    python3 bench/rank_memory.py --model /tmp/qwen3.gguf --baseline /tmp/thin.gguf --ranks 2

Starts a server of the model, as one process and as ranks over MPI, and reads `/proc/PID/smaps` of each process after an
answer. The baseline is a model with the same vocabulary and the same KV cache but hardly any weights; what its
processes hold is subtracted, so that the difference is weights. Pages of the model's file count as well as private memory.
Fails if a rank holds more than 1/N + 5 % of what one process holds. Linux only.
"""

import argparse
import contextlib
import json
import os
import subprocess
import time
import urllib.request
from pathlib import Path

ALLOWANCE = 0.05
START_TIMEOUT = 300
Memory = dict[str, float]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ferrum", default="target/release/ferrum")
    parser.add_argument("--model", required=True)
    parser.add_argument("--baseline", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    return parser.parse_args()


def size(model: str) -> int:
    """Bytes of a GGUF file, or of the weights in a folder."""
    path = Path(model)
    return sum(file.stat().st_size for file in (path.glob("*.safetensors") if path.is_dir() else [path]))


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have."""
    children = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        # A thread may end while its folder is read.
        with contextlib.suppress(FileNotFoundError):
            children += [int(child) for child in (thread / "children").read_text().split()]
    return children + [found for child in children for found in descendants(child)]


def rank_of(pid: int) -> int:
    for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        name, _, value = variable.partition(b"=")
        if name == b"OMPI_COMM_WORLD_RANK":
            return int(value)
    return 0


def memory(pid: int, model: str) -> Memory:
    """Resident megabytes of a process: its private memory, and the pages of the model's file that it maps."""
    found = {"private": 0.0, "file": 0.0}
    path, is_model = os.path.realpath(model), False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        key, *values = line.split()
        if not key.endswith(":"):
            is_model = path in line
        elif is_model and key == "Rss:":
            found["file"] += int(values[0]) * 1024 / 1e6
        elif not is_model and key in ("Private_Clean:", "Private_Dirty:", "Private_Hugetlb:"):
            found["private"] += int(values[0]) * 1024 / 1e6
    return found


def address_of(server: subprocess.Popen) -> str:
    """Where a server answers, from what it prints when it is ready."""
    printed = ""
    for line in server.stderr:
        printed += line
        if "API base" in line:
            return line.split("API base")[1].strip()
    raise SystemExit(f"the server did not start:\n{printed}")


def measure(args, model: str, ranks: int) -> list[Memory]:
    """The memory of each rank of a server that has answered a request."""
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    command = [*(mpirun if ranks > 1 else []), args.ferrum, "serve", model, "--backend", "cpu", "--port", "0"]
    command += ["--threads", "1", "--context", "64", "--max-seqs", "1", "--no-weight-cache"]
    command += ["--tensor-parallel", str(ranks)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        url = f"{address_of(server)}/completions"
        body = json.dumps({"prompt": [1, 2, 3, 4], "max_tokens": 4}).encode()
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        until = time.monotonic() + START_TIMEOUT
        while True:
            try:
                urllib.request.urlopen(request, timeout=START_TIMEOUT).read()
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)
        ferrum = os.path.realpath(args.ferrum)
        pids = [pid for pid in [server.pid, *descendants(server.pid)] if os.path.realpath(f"/proc/{pid}/exe") == ferrum]
        if len(pids) != ranks:
            raise SystemExit(f"found {len(pids)} processes, expected {ranks}")
        return [memory(pid, model) for pid in sorted(pids, key=rank_of)]
    finally:
        server.terminate()
        server.wait()


def weights(args, ranks: int) -> list[Memory]:
    """What each rank holds of the model more than of the baseline."""
    both = zip(measure(args, args.model, ranks), measure(args, args.baseline, ranks), strict=True)
    return [{key: model[key] - baseline[key] for key in model} for model, baseline in both]


def main():
    args = arguments()
    stored = (size(args.model) - size(args.baseline)) / 1e6
    print(f"weights in the file: {stored:.1f} MB more than in that of the baseline")
    (alone,) = weights(args, 1)
    whole = sum(alone.values())
    print(f"one process: {whole:.1f} MB (private {alone['private']:.1f}, pages of the file {alone['file']:.1f})")
    most = 1 / args.ranks + ALLOWANCE
    shares = []
    for rank, held in enumerate(weights(args, args.ranks)):
        share = sum(held.values()) / whole
        shares.append(share)
        print(
            f"rank {rank} of {args.ranks}: {sum(held.values()):.1f} MB (private {held['private']:.1f}, "
            f"pages of the file {held['file']:.1f}), {share:.3f} of one process, at most {most:.3f} allowed"
        )
    if max(shares) > most:
        raise SystemExit("a rank holds more than its share")


if __name__ == "__main__":
    main()
