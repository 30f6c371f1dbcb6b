"""Fills a float GGUF model's matrices with random numbers from Student's t, for `compare.py`.

Trained weights have rare large numbers; how a quantiser treats these shows better when there are many.
Norms and all metadata stay as they are; each matrix keeps its root mean square, so that activations stay
in range.

    heavy_tails.py demo-f32.gguf heavy-f32.gguf --freedom 4

Needs gguf and numpy. No test needs this script.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import gguf
import numpy as np


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", type=Path, help="GGUF in f32")
    parser.add_argument("out", type=Path)
    parser.add_argument("--freedom", type=float, default=4.0, help="degrees of freedom; fewer mean heavier tails")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    shutil.copyfile(args.source, args.out)
    numbers = np.random.default_rng(args.seed)
    for tensor in gguf.GGUFReader(args.out, "r+").tensors:
        if len(tensor.shape) < 2:
            continue
        if tensor.tensor_type != gguf.GGMLQuantizationType.F32:
            raise SystemExit(f"{tensor.name} has type {tensor.tensor_type.name}, expected F32")
        drawn = numbers.standard_t(args.freedom, tensor.data.shape)
        tensor.data[:] = drawn * np.sqrt(np.mean(np.square(tensor.data)) / np.mean(np.square(drawn)))


if __name__ == "__main__":
    main()
