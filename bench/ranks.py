#!/usr/bin/env python3
"""Ranks beside one process with as many threads: the same model, alternating runs.

Printed are medians of tokens per second, the median of the ratios to one process within each round, and the spread of the ratios
for answers. Other work on the machine slows runs of a round alike, so ratios say more than figures.

    python3 tools/models/make_random_model.py qwen3-0.6b /tmp/qwen3-0.6b-q8_0.gguf --format gguf --dtype q8_0
    cargo build --release --features mpi
    python3 bench/ranks.py --model /tmp/qwen3-0.6b-q8_0.gguf --ranks 2

`--threads-only` measures ranks that are threads of one process, which needs no MPI.
"""

import argparse
import json
import os
import statistics
import subprocess


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ferrum", default="target/release/ferrum")
    parser.add_argument("--model", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--gen", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=3, help="runs of a process, of which the median counts")
    parser.add_argument("--threads-only", action="store_true")
    return parser.parse_args()


def measure(args, before, more):
    """Tokens per second of prompt and answer."""
    command = [*before, args.ferrum, "bench", args.model, "--backend", "cpu", "--json", "--no-weight-cache"]
    command += ["--prompt", str(args.prompt), "--gen", str(args.gen), "--repeat", str(args.repeat), *more]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr}")
    report = json.loads(done.stdout)
    return report["prefill_tokens_per_s"], report["decode_tokens_per_s"]


def main():
    args = arguments()
    n = str(args.ranks)
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", n]
    ways = {
        f"one process, {n} threads": ([], ["--threads", n]),
        f"{n} ranks of a thread": ([], ["--threads", "1", "--tensor-parallel", n]),
    }
    if not args.threads_only:
        ways[f"{n} processes of a thread"] = (mpirun, ["--threads", "1", "--tensor-parallel", n])
    found = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way, (before, more) in ways.items():
            found[way].append(measure(args, before, more))
    alone = next(iter(found.values()))
    for way, runs in found.items():
        prompt, answer = ([run[i] for run in runs] for i in (0, 1))
        prompts, answers = ([run[i] / beside[i] for run, beside in zip(runs, alone, strict=True)] for i in (0, 1))
        print(
            f"{way:28} prompt {statistics.median(prompt):8.1f} tok/s ({statistics.median(prompts):.2f}x), "
            f"answer {statistics.median(answer):7.2f} tok/s ({statistics.median(answers):.2f}x, "
            f"{min(answers):.2f} to {max(answers):.2f})"
        )
    print(f"load average of the last minute: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
