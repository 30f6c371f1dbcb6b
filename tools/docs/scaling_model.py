"""The cost model of docs/scaling.md: prints its tables.

    python3 tools/docs/scaling_model.py
    python3 tools/docs/scaling_model.py --bandwidth 21e9 --products 90e9 --collective 50e-6 --link 4e9

With the figures of a machine, the second one prints what a model of 1B is predicted to reach there: in one process, and in ranks that share its cores
and its memory.
"""

import argparse
from dataclasses import dataclass


@dataclass
class Model:
    name: str
    layers: int
    hidden: int
    kv_bytes: int  # of a token in a layer, keys and values in f16
    parameters: float
    weight_bytes: float  # of a parameter
    dense: float = 0.0  # parameters that every token uses; 0: all
    experts: int = 0
    chosen: int = 0

    def read(self, batch):
        """Bytes of weights that a step of so many sequences reads."""
        if not self.experts:
            return self.parameters * self.weight_bytes
        share = 1 - (1 - self.chosen / self.experts) ** batch
        return (self.dense + (self.parameters - self.dense) * share) * self.weight_bytes

    def used(self):
        """Parameters that a token is multiplied with."""
        if not self.experts:
            return self.parameters
        return self.dense + (self.parameters - self.dense) * self.chosen / self.experts


@dataclass
class Device:
    name: str
    bandwidth: float  # bytes/s that are reached
    flops: float  # that are reached in products
    latency: float  # s of a collective without bytes
    link: float  # bytes/s between two ranks
    activation: int  # bytes of an element


MODELS = [
    Model("8B, 4 bits", 36, 4096, 4096, 8.2e9, 0.56),
    Model("70B, 4 bits", 80, 8192, 4096, 70.6e9, 0.56),
    Model("30B-A3B, 4 bits", 48, 2048, 2048, 30.5e9, 0.56, 1.5e9, 128, 8),
]
DEVICES = [
    Device("server CPU, 12 channels of DDR5", 350e9, 3e12, 8e-6, 20e9, 4),
    Device("H100 with NVLink", 2.6e12, 400e12, 12e-6, 300e9, 2),
]


def step(model, device, ranks, batch, context):
    """Seconds of a decode step."""
    cache = batch * context * model.layers * model.kv_bytes
    memory = (model.read(batch) + cache) / ranks / device.bandwidth
    products = 2 * model.used() * batch / ranks / device.flops
    part = batch * model.hidden * device.activation
    # Two sums a layer, the embedding's and the logits'.
    collectives = 2 * model.layers + 2
    exchange = 0 if ranks == 1 else collectives * (device.latency + (ranks - 1) * part / device.link)
    return max(memory, products) + exchange


def prompt(model, device, ranks, tokens):
    """Seconds of a prompt, whose products take longer than its weights."""
    part = tokens * model.hidden * device.activation
    collectives = 2 * model.layers + 2
    exchange = 0 if ranks == 1 else collectives * (device.latency + (ranks - 1) * part / device.link)
    return 2 * model.used() * tokens / ranks / device.flops + exchange


def machine(args):
    """One process, and two ranks with half of the machine each."""
    model = Model("1B, Q8_0", 16, 2048, 2048, 1.236e9, 1.0625)
    for ranks in (1, 2):
        each = Device("", args.bandwidth / ranks, args.products / ranks, args.collective, args.link, 4)
        answer = 1 / step(model, each, ranks, 1, 144)
        tokens = 128 / prompt(model, each, ranks, 128)
        print(f"{model.name}, {ranks} ranks: answers {answer:.1f} tokens/s, prompts of 128 tokens {tokens:.0f} tokens/s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", type=float, help="bytes/s that all cores read from memory together")
    parser.add_argument("--products", type=float, help="operations/s of all cores in products of prompts")
    parser.add_argument("--collective", type=float, help="seconds of a sum over two ranks of one token")
    parser.add_argument("--link", type=float, help="bytes/s between two ranks")
    args = parser.parse_args()
    if args.bandwidth:
        return machine(args)
    tables()


def tables():
    for device in DEVICES:
        for batch in (1, 32):
            print(f"\n{device.name}, {batch} sequences of 2048 tokens: tokens/s on 1, 2, 4, 8 ranks")
            for model in MODELS:
                rates = [batch / step(model, device, ranks, batch, 2048) for ranks in (1, 2, 4, 8)]
                print(f"| {model.name} | " + " | ".join(f"{rate:.0f}" for rate in rates) + " |")
    print("\nreplicas of 8B on one H100 each, 32 sequences: tokens/s")
    one = 32 / step(MODELS[0], DEVICES[1], 1, 32, 2048)
    for replicas in (10, 100, 1000):
        print(f"| {replicas} | {one * replicas * 0.7:.3g} |")


if __name__ == "__main__":
    main()
