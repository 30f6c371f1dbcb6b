"""Looks at the innermost loops of the CPU kernels in a binary: what they call, and what they keep on the stack.

Why: a kernel is written once over `Simd` and compiled for each level inside one function
(`run_avx2`, `bytes_avx512`, …). A closure or an iterator that is not inlined there becomes a call for each
vector, which once made FP8 twenty times slower, and a compiler that keeps too much for later fills the
stack. No test sees either; nor does a profile, unless somebody runs that type on that processor.

Usage (on x86-64, with binutils):
  python tools/kernels/loops.py target/release/ferrum            loops with products that call something
  python tools/kernels/loops.py target/release/ferrum --stack 8  loops that use the stack for vectors as often
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

LEVEL = re.compile(r"3isa\d+(?:Byte)?Kernel\d+((?:run|bytes)_\w+?)17h")
PRODUCT = re.compile(r"vfn?madd|vpdp|vdpbf16|vpmaddub|vpmulld")
# Copies of the ends of rows that are shorter than a vector: beside the loop, in its range of addresses. Calls
# through the table of addresses (`_DYNAMIC`) have no name here and are left out too.
ENDS = ("copy_from_slice", "memcpy", "memset", "panic", "slice_index", "_DYNAMIC")


class Instruction(NamedTuple):
    address: int
    name: str
    operands: str


def functions(binary: str) -> Iterator[tuple[str, list[Instruction]]]:
    """Each function of a level, with its instructions."""
    command = ["objdump", "--disassemble", "--no-show-raw-insn", binary]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as objdump:
        level, body = None, []
        for line in objdump.stdout:
            if start := re.match(r"[0-9a-f]+ <(.*)>:$", line):
                if level:
                    yield level, body
                name = LEVEL.search(start[1])
                level, body = name and name[1], []
            elif level and (found := re.match(r"\s*([0-9a-f]+):\s+(?:\{vex\} )?(\S+)\s*(.*)", line)):
                body.append(Instruction(int(found[1], 16), found[2], found[3]))
        if level:
            yield level, body
    if objdump.returncode:
        sys.exit(objdump.returncode)


def innermost(body: list[Instruction]) -> Iterator[list[Instruction]]:
    """Loops that have none inside: from the target of a jump back to the jump."""
    places = {instruction.address: i for i, instruction in enumerate(body)}
    loops = set()
    for i, (_, name, operands) in enumerate(body):
        if name.startswith("j") and (target := re.match(r"[0-9a-f]+", operands)):
            start = places.get(int(target[0], 16), i + 1)
            if start <= i:
                loops.add((start, i))
    for start, end in sorted(loops):
        if not any(start <= s and e <= end and (s, e) != (start, end) for s, e in loops):
            yield body[start : end + 1]


def called(loop: list[Instruction]) -> set[str]:
    names = (re.search(r"<(.*?)(?:17h[0-9a-f]{16}E.*)?>", i.operands) for i in loop if i.name == "call")
    return {name[1] for name in names if name and not any(end in name[1] for end in ENDS)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--stack", type=int, metavar="N", help="show loops with at least N uses of the stack")
    args = parser.parse_args()
    found = 0
    for level, body in functions(args.binary):
        for loop in innermost(body):
            products = sum(bool(PRODUCT.match(i.name)) for i in loop)
            stack = sum("(%rsp" in i.operands and "mm" in i.operands for i in loop)
            calls = called(loop)
            wanted = calls if args.stack is None else stack >= args.stack
            if products < 2 or not wanted:
                continue
            found += 1
            size = f"{len(loop)} instructions, {products} products, {stack} of vectors on the stack"
            print(f"{level} {loop[0].address:#x}: {size}", *sorted(calls), sep="\n    ")
    print(f"{found} loops", file=sys.stderr)
    sys.exit(bool(found) and args.stack is None)


if __name__ == "__main__":
    main()
