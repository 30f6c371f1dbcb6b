"""What arithmetic on quantised weights costs, in Ferrum and in llama.cpp, on the same files.

Both engines compute the logits of the same tokens from each quantised file; printed is the mean KL
divergence (nats per token) from the logits of the float model the files were made of, the standard
error, and the ratio of the two engines. The files have the same weights, so what differs is how each
engine rounds activations and orders its sums.

    python bench/quality.py --ferrum target/release/ferrum --float MODEL-bf16.gguf MODEL-q4_k_m.gguf...

Needs llama-cpp-python and numpy. Random weights will do: what is compared are the engines.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import numpy as np
from compare import Llama


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits - logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def ferrum(binary: str, model: str, tokens: list[int]) -> np.ndarray:
    command = [binary, "logits", "--backend", "cpu", "--kv-dtype", "f16", "--json", "--model", model]
    done = subprocess.run([*command, "--tokens", ",".join(map(str, tokens))], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return log_softmax(np.array(json.loads(done.stdout)["logits"]))


def llama(model: str, tokens: list[int], threads: int) -> np.ndarray:
    engine = Llama(model, threads, len(tokens), 1)
    engine.step([(token, position, 0) for position, token in enumerate(tokens)], logits_from=0)
    logits = engine.lib.llama_get_logits(engine.context)
    values = np.ctypeslib.as_array(logits, (len(tokens), engine.vocab)).astype(np.float64)
    engine.close()
    return log_softmax(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="quantised GGUF files of one model")
    parser.add_argument("--float", required=True, help="the GGUF file in floats that they were made of")
    parser.add_argument("--ferrum", default="target/release/ferrum")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    a = parser.parse_args()
    reference = None
    print("| file | Ferrum | llama.cpp | ratio | same best token: Ferrum | llama.cpp |\n|---|---:|---:|---:|---:|---:|")
    for model in a.models:
        if reference is None:
            # Ids below the size of any vocabulary, in no order.
            tokens = [(i * 7919 + 11) % 1000 for i in range(a.tokens)]
            reference = ferrum(a.ferrum, a.float, tokens)
        row = []
        for found in (ferrum(a.ferrum, model, tokens), llama(model, tokens, a.threads)):
            divergence = (np.exp(reference) * (reference - found)).sum(axis=1)
            same = (reference.argmax(axis=1) == found.argmax(axis=1)).mean()
            row.append((divergence.mean(), divergence.std() / np.sqrt(len(tokens)), 100 * same))
        (ours, our_error, our_same), (theirs, their_error, their_same) = row
        print(
            f"| {Path(model).name} | {ours:.3e} ± {our_error:.0e} | {theirs:.3e} ± {their_error:.0e} "
            f"| {ours / theirs:.3f} | {our_same:.0f} % | {their_same:.0f} % |",
            flush=True,
        )


if __name__ == "__main__":
    main()
