"""Many rude clients at once, for a while: `python tools/clients/soak.py [--url URL] [--pid PID]`.

Each client streams answers and holds every one against what a single request got before; some go away in
the middle, read slowly, send bodies that are too long, broken JSON or fields that nobody knows. At the end
there must be no wrong answer, nothing left running, no KV block in use, and health must have been green all
the while. Prints figures as JSON; the exit status says whether all of that held.

With `--attack`, honest clients stream answers alone for half of the time, and for the other half beside attackers,
who need no key: pipelined requests and streams of which nothing is read, methods that nobody knows, bodies of 16 MB of
small numbers, and bodies that are announced and never come. It prints the time between tokens in both halves, how
health was answered over time, and the server's memory (with `--pid`), and fails where health was not answered or an
honest answer was wrong.

Needs nothing but Python. The prompts are made for the demo model, which `ferrum serve` serves; any model
whose answers do not depend on their neighbours will do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import resource
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

ANIMALS = ["fox", "mouse", "bear", "owl", "cat", "dog", "frog", "duck"]
OVERSIZE = 1 << 30
PATIENCE = 300  # seconds that an answer may take
HEALTH_PATIENCE = 10  # seconds that a look at the health may take
LONGEST_BODY = 16 << 20


class Broken(Exception):
    """The connection ended early."""


def bodies() -> list[dict]:
    """Requests whose answers are always the same: greedy ones, and seeded ones."""
    questions = [f"What is {a} plus {b}?" for a in range(2, 8) for b in range(3, 7)]
    questions += [f"Tell me a story about a {animal}." for animal in ANIMALS]
    out = []
    for i, question in enumerate(questions):
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 48}
        body |= {"temperature": 0} if i % 2 else {"temperature": 1.2, "seed": i}
        out.append(body)
    return out


class Http:
    """One request on a connection of its own, read as it comes."""

    def __init__(self, host: str, port: int, key: str | None) -> None:
        self.host, self.port, self.key = host, port, key

    async def open(self, method: str, path: str, body: bytes = b"", length: int | None = None):
        reader, writer = await asyncio.open_connection(self.host, self.port)
        head = f"{method} {path} HTTP/1.1\r\nHost: {self.host}\r\nConnection: close\r\n"
        if self.key:
            head += f"Authorization: Bearer {self.key}\r\n"
        if method == "POST":
            head += f"Content-Type: application/json\r\nContent-Length: {length or len(body)}\r\n"
        writer.write(head.encode() + b"\r\n" + body)
        await writer.drain()
        line = await reader.readline()
        if not line:
            raise Broken
        headers = {}
        while (field := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = field.decode().partition(":")
            headers[name.lower()] = value.strip()
        return int(line.split()[1]), headers, reader, writer

    async def chunks(self, headers: dict, reader: asyncio.StreamReader):
        if headers.get("transfer-encoding") != "chunked":
            yield await reader.read()
            return
        while True:
            size = await reader.readline()
            if not size:
                raise Broken
            if (n := int(size, 16)) == 0:
                return
            yield (await reader.readexactly(n + 2))[:-2]

    async def whole(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        status, headers, reader, writer = await self.open(method, path, body)
        data = b"".join([part async for part in self.chunks(headers, reader)])
        writer.close()
        return status, data


def figure(page: str, name: str) -> float:
    lines = (line for line in page.splitlines() if line.startswith(name) and line[len(name)] in " {")
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


class Soak:
    def __init__(self, http: Http, seconds: float) -> None:
        self.http = http
        self.end = time.monotonic() + seconds
        self.bodies = bodies()
        self.expected: list[tuple[str, str]] = []
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.gaps: list[float] = []
        self.first: list[float] = []
        self.unhealthy: list[str] = []
        self.memory: list[int] = []
        self.health: list[float] = []

    async def learn(self) -> None:
        for body in self.bodies:
            status, data = await self.http.whole("POST", "/v1/chat/completions", json.dumps(body).encode())
            assert status == 200, data
            choice = json.loads(data)["choices"][0]
            self.expected.append((choice["message"]["content"], choice["finish_reason"]))

    async def stream(self, random_: random.Random, manner: str) -> None:
        which = random_.randrange(len(self.bodies))
        body = json.dumps(self.bodies[which] | {"stream": True}).encode()
        started = last = time.monotonic()
        status, headers, reader, writer = await self.http.open("POST", "/v1/chat/completions", body)
        if status == 429 or status == 503 and "retry-after" in headers:
            self.counts["told to come back"] += 1
            writer.close()
            return await asyncio.sleep(float(headers["retry-after"]))
        assert status == 200, status
        leave_after = random_.randrange(1, 40)
        text, finish, buffer = "", None, b""
        async for part in self.http.chunks(headers, reader):
            now = time.monotonic()
            if last == started:
                self.first.append(now - started)
            elif manner == "answer":
                self.gaps.append(now - last)
            last = now
            buffer += part
            *events, buffer = buffer.split(b"\n\n")
            for event in events:
                if not event.startswith(b"data: {"):
                    continue
                for choice in json.loads(event[6:])["choices"]:
                    text += choice["delta"].get("content") or ""
                    finish = choice["finish_reason"] or finish
            leave_after -= 1
            if manner == "gone in the middle" and leave_after == 0:
                writer.transport.abort()
                return
            if manner == "slow reader":
                await asyncio.sleep(random_.random() * 0.3)
        writer.close()
        if (text, finish) != self.expected[which]:
            self.wrong.append(f"{self.bodies[which]}: {text!r} {finish}, expected {self.expected[which]}")

    async def refused(self, path: str, body: bytes, wanted: int, length: int | None = None) -> None:
        status, _, _, writer = await self.http.open("POST", path, body, length)
        writer.close()
        if status != wanted:
            self.wrong.append(f"{path} {body[:80]!r}: status {status}, expected {wanted}")

    async def client(self, number: int) -> None:
        random_ = random.Random(number)
        chat = "/v1/chat/completions"
        while time.monotonic() < self.end:
            manner = random_.choices(
                ["answer", "gone in the middle", "slow reader", "too long", "broken JSON", "no message"],
                [70, 10, 5, 5, 5, 5],
            )[0]
            try:
                async with asyncio.timeout(PATIENCE):
                    match manner:
                        case "too long":
                            await self.refused(chat, b"{", 413, OVERSIZE)
                        case "broken JSON":
                            await self.refused(chat, b'{"messages": [{]}', 400)
                        case "no message":
                            await self.refused(chat, b'{"messages": [], "surprise": 1}', 400)
                        case _:
                            await self.stream(random_, manner)
                self.counts[manner] += 1
            except (OSError, Broken, asyncio.IncompleteReadError, TimeoutError) as error:
                self.wrong.append(f"{manner}: {type(error).__name__} {error}")

    async def watch(self, pid: int | None) -> None:
        while time.monotonic() < self.end:
            started = time.monotonic()
            try:
                async with asyncio.timeout(HEALTH_PATIENCE):
                    status, data = await self.http.whole("GET", "/health")
                if status != 200:
                    self.unhealthy.append(data.decode())
            except (OSError, Broken, asyncio.IncompleteReadError, TimeoutError) as error:
                self.unhealthy.append(f"not answered: {type(error).__name__} {error}")
            self.health.append(time.monotonic() - started)
            if pid:
                pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
                self.memory.append(int(pages) * 4096)
            await asyncio.sleep(max(0.0, 1 - (time.monotonic() - started)))

    async def honest(self, number: int) -> None:
        """A client that only streams answers, and goes on for as long as it is told to come back."""
        random_ = random.Random(number)
        while time.monotonic() < self.end:
            try:
                async with asyncio.timeout(PATIENCE):
                    await self.stream(random_, "answer")
                self.counts["answer"] += 1
            except (OSError, Broken, asyncio.IncompleteReadError, TimeoutError) as error:
                self.wrong.append(f"honest: {type(error).__name__} {error}")

    async def settle(self) -> dict[str, float]:
        """What is left when nobody asks any more."""
        names = ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"]
        for _ in range(100):
            page = (await self.http.whole("GET", "/metrics"))[1].decode()
            left = {name: figure(page, name) for name in names}
            if not any(left.values()):
                break
            await asyncio.sleep(0.2)
        return left


class Attack:
    """Clients that mean harm, until `end`."""

    def __init__(self, host: str, port: int, end: float) -> None:
        self.host, self.port, self.end = host, port, end
        self.counts: Counter[str] = Counter()
        numbers = b"1," * (LONGEST_BODY // 2 - 64) + b"1"
        self.bodies = [b'{"prompt":[' + numbers + b"]}", b'{"prompt":"a","stop_token_ids":[' + numbers + b"]}"]

    def head(self, method: str, path: str, length: int | None = None) -> bytes:
        head = f"{method} {path} HTTP/1.1\r\nHost: {self.host}\r\n"
        if length is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {length}\r\n"
        return head.encode() + b"\r\n"

    async def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (self.host, self.port))
        return sock

    async def hold(self, name: str, said: bytes, more: bytes) -> None:
        """Says something, reads nothing, and comes back whenever the server has had enough of it."""
        loop = asyncio.get_running_loop()
        while time.monotonic() < self.end:
            sock = None
            try:
                async with asyncio.timeout(max(0.1, self.end - time.monotonic())):
                    sock = await self.connect()
                    self.counts[name] += 1
                    await loop.sock_sendall(sock, said)
                    while True:
                        await asyncio.sleep(1)
                        await loop.sock_sendall(sock, more)
            except (OSError, TimeoutError):
                await asyncio.sleep(0.1)
            finally:
                if sock:
                    sock.close()

    async def ask(self, name: str, message: bytes) -> None:
        """Sends one request as a whole, and reads the first line of what comes."""
        try:
            async with asyncio.timeout(60):
                reader, writer = await asyncio.open_connection(self.host, self.port)
                try:
                    writer.write(message)
                    await writer.drain()
                    line = await reader.readline()
                    status = line.split()[1].decode() if line else "nothing"
                finally:
                    writer.transport.abort()
        except (OSError, TimeoutError):
            status = "closed"
        self.counts[f"{name}: {status}"] += 1

    async def odd_methods(self, number: int) -> None:
        random_ = random.Random(number)
        letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        while time.monotonic() < self.end:
            method = "".join(random_.choices(letters, k=random_.choice([3, 7, 40, 2000])))
            path = random_.choice(["/", "/v1/models", "/v1/chat/completions", f"/{random_.random()}"])
            await self.ask("odd method", self.head(method, path, 0))
            await asyncio.sleep(0.05)

    async def long_bodies(self, number: int) -> None:
        body = self.bodies[number % len(self.bodies)]
        while time.monotonic() < self.end:
            await self.ask("long body", self.head("POST", "/v1/completions", len(body)) + body)

    def clients(self, holders: int) -> list:
        """All of them as coroutines."""
        get = self.head("GET", "/")
        stream = json.dumps({
            "prompt": "Once upon a time", "max_tokens": 500, "n": 4, "ignore_eos": True, "logprobs": 20, "stream": True,
        }).encode()
        stream = self.head("POST", "/v1/completions", len(stream)) + stream
        never = self.head("POST", "/v1/completions", LONGEST_BODY)
        return [
            *(self.hold("unread pages", get * 50, get) for _ in range(holders)),
            *(self.hold("unread stream", stream, b"") for _ in range(4)),
            *(self.hold("body that never comes", never, b" ") for _ in range(32)),
            *(self.odd_methods(n) for n in range(4)),
            *(self.long_bodies(n) for n in range(16)),
        ]


class Attackers:
    """All of them, in a process of their own: what they cost themselves is not what honest clients notice."""

    def __init__(self, soak: Soak, holders: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.said = context.SimpleQueue()
        seconds = soak.end - time.monotonic()
        arguments = (soak.http.host, soak.http.port, seconds, holders, self.said)
        self.process = context.Process(target=attackers, args=arguments)
        self.process.start()

    def counts(self) -> dict[str, int]:
        counts = self.said.get()
        self.process.join()
        return counts


def attackers(host: str, port: int, seconds: float, holders: int, said) -> None:
    """The whole process: says at the end how often what was done.

    Attackers have machines of their own. Here they take what the server and the honest clients leave of this one.
    """
    os.nice(19)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, holders + 256)), hard))
    attack = Attack(host, port, time.monotonic() + seconds)

    async def all_of_them() -> None:
        await asyncio.gather(*attack.clients(holders))

    asyncio.run(all_of_them())
    said.put(dict(attack.counts))


async def attack(a: argparse.Namespace, soak: Soak) -> int:
    halves = {}
    for name in ["alone", "under attack"]:
        soak.gaps, soak.first, soak.health, soak.memory = [], [], [], []
        before = Counter(soak.counts)
        soak.end = time.monotonic() + a.seconds / 2
        attackers = Attackers(soak, a.holders) if name == "under attack" else None
        honest = (soak.honest(n) for n in range(a.clients))
        await asyncio.gather(soak.watch(a.pid), *honest)
        halves[name] = {
            "answers": soak.counts["answer"] - before["answer"],
            "told_to_come_back": soak.counts["told to come back"] - before["told to come back"],
            "time_to_first_token_s": {p: percentile(soak.first, p / 100) for p in (50, 99)},
            "inter_token_s": {p: percentile(soak.gaps, p / 100) for p in (50, 99)},
            "health_s": {"looks": len(soak.health), 50: percentile(soak.health, 0.5), "max": round(max(soak.health), 3)},
            "memory_mb": [round(m / 1e6) for m in (soak.memory[0], max(soak.memory), soak.memory[-1])] if soak.memory else None,
            "attackers": attackers.counts() if attackers else {},
        }
    left = await soak.settle()
    print(json.dumps({
        "clients": a.clients,
        "seconds": a.seconds,
        "halves": halves,
        "wrong": soak.wrong[:10],
        "wrong_count": len(soak.wrong),
        "unhealthy": soak.unhealthy[:3],
        "unhealthy_count": len(soak.unhealthy),
        "left": left,
    }, indent=2))
    return int(bool(soak.wrong or soak.unhealthy or any(left.values())))


def percentile(values: list[float], share: float) -> float | None:
    values = sorted(values)
    return round(values[min(len(values) - 1, int(share * len(values)))], 4) if values else None


async def run(a: argparse.Namespace) -> int:
    url = urlsplit(a.url)
    soak = Soak(Http(url.hostname or "127.0.0.1", url.port or 80, a.key), a.seconds)
    await soak.learn()
    if a.attack:
        return await attack(a, soak)
    soak.end = time.monotonic() + a.seconds
    await asyncio.gather(soak.watch(a.pid), *(soak.client(n) for n in range(a.clients)))
    left = await soak.settle()
    tail = soak.memory[len(soak.memory) // 3 :]
    print(json.dumps({
        "clients": a.clients,
        "seconds": a.seconds,
        "requests": dict(soak.counts),
        "wrong": soak.wrong[:10],
        "wrong_count": len(soak.wrong),
        "unhealthy": soak.unhealthy[:3],
        "left": left,
        "time_to_first_token_s": {p: percentile(soak.first, p / 100) for p in (50, 99)},
        "inter_token_s": {p: percentile(soak.gaps, p / 100) for p in (50, 90, 99)},
        "memory_mb": [round(m / 1e6) for m in (tail[0], max(tail), tail[-1])] if tail else None,
    }, indent=2))
    return int(bool(soak.wrong or soak.unhealthy or any(left.values())))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key")
    parser.add_argument("--pid", type=int, help="the server's process, to watch its memory")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--attack", action="store_true", help="half of the time with attackers beside honest clients")
    parser.add_argument("--holders", type=int, default=600, help="connections of --attack that send and do not read")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
