"""Compares the errors of weights under `ferrum quantize` and under llama.cpp's own quantiser.

For each type llama.cpp and each of our searches make a file of the same float GGUF model; printed are the root
mean square errors of all matrices in units of the numbers' own, ours over llama.cpp's, and how many of the
quantised tensors of the fast search are the same byte for byte.

    errors.py --ferrum target/release/ferrum --model demo-f32.gguf

Needs llama-cpp-python, gguf and numpy. No test needs this script.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize

from compare import SEARCHES, TYPES, ours, silence, theirs


def matrices(path: Path) -> dict[str, gguf.ReaderTensor]:
    return {t.name: t for t in gguf.GGUFReader(path).tensors if len(t.shape) > 1}


def error(exact: dict[str, np.ndarray], found: dict[str, gguf.ReaderTensor]) -> float:
    misses = squares = 0.0
    for name, values in exact.items():
        back = dequantize(found[name].data, found[name].tensor_type)
        misses += np.square(values - back, dtype=np.float64).sum()
        squares += np.square(values, dtype=np.float64).sum()
    return float(np.sqrt(misses / squares))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ferrum", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="GGUF in f32, f16 or bf16")
    parser.add_argument("--types", nargs="*", default=list(TYPES))
    args = parser.parse_args()
    silence()

    exact = {name: dequantize(t.data, t.tensor_type) for name, t in matrices(args.model).items()}
    print("| type | fast | thorough | llama.cpp | fast / llama.cpp | thorough / llama.cpp | same bytes |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name in args.types:
        with tempfile.TemporaryDirectory(dir=args.model.parent) as folder:
            files = [Path(folder, f"{m}.gguf") for m in (*SEARCHES, "llama.cpp")]
            for search, file in zip(SEARCHES, files, strict=False):
                ours(args.ferrum, args.model, file, name, None, search)
            theirs(args.model, files[-1], TYPES[name], None)
            found = [matrices(file) for file in files]
            same = sum(np.array_equal(t.data, found[-1][n].data) for n, t in found[0].items())
            errors = [error(exact, of) for of in found]
        cells = [f"{e:.5f}" for e in errors] + [f"{e / max(errors[-1], 1e-30):.3f}" for e in errors[:-1]]
        print(f"| {name} | {' | '.join(cells)} | {same} of {len(found[0])} |", flush=True)


if __name__ == "__main__":
    main()
