"""Two replicas on a local Ray cluster, one of which is killed under load.

    FERRUM_BINARY=target/debug/ferrum pytest deploy/ray
"""

import concurrent.futures
import json
import os
import signal
import time

import httpx
import pytest
import ray
from ray import serve

import ferrum_ray

URL = "http://127.0.0.1:18452"
BINARY = os.environ.get("FERRUM_BINARY", "ferrum")
if os.path.exists(BINARY):
    BINARY = os.path.abspath(BINARY)
REQUESTS = 60


@pytest.fixture(scope="module")
def replicas():
    # Workers import the application by its name, wherever pytest was started.
    environment = {"env_vars": {"PYTHONPATH": os.path.dirname(os.path.abspath(ferrum_ray.__file__))}}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    serve.start(http_options={"host": "127.0.0.1", "port": 18452})
    settings = {
        "binary": BINARY,
        "flags": ["--backend", "cpu", "--threads", "1", "--max-seqs", "4"],
        "min_replicas": 2,
        "max_replicas": 2,
        "cpus": 0.5,
        "target_requests": 4,
    }
    serve.run(ferrum_ray.build(settings), name="ferrum")
    deadline = time.time() + 120
    while len(servers()) < 2:
        assert time.time() < deadline, "two replicas did not start"
        time.sleep(0.2)
    yield
    serve.shutdown()
    ray.shutdown()


def servers():
    """Process numbers of the servers that the replicas have started."""
    name = os.path.realpath(BINARY)
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.path.realpath(f"/proc/{pid}/exe") == name:
                found.append(int(pid))
        except OSError:
            pass
    return sorted(found)


def ask(number, tokens=48, stream=True):
    """The text of an answer, or what went wrong."""
    body = {"prompt": f"Story {number % 5}:", "max_tokens": tokens, "temperature": 0, "stream": stream}
    text, ended = "", False
    with httpx.stream("POST", f"{URL}/v1/completions", json=body, timeout=120) as answer:
        if not stream or answer.status_code != 200:
            fields = json.loads(answer.read())
            if answer.status_code != 200:
                return None, fields["error"]
            return fields["choices"][0]["text"], None
        for line in answer.iter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                ended = True
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return None, event["error"]
            text += "".join(choice["text"] for choice in event["choices"])
    # A stream that ends without an end says nothing: nobody may take it for an answer.
    assert ended, "a stream ended without [DONE] and without an error"
    return text, None


def test_a_killed_replica_fails_its_own_requests_alone(replicas):
    expected = {n: ask(n)[0] for n in range(5)}
    assert all(expected.values())
    assert ask(1, stream=False)[0] == expected[1]
    before = servers()
    assert len(before) == 2
    killed_at = None
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        started = {}

        def timed(n):
            started[n] = time.time()
            return ask(n), time.time()

        asked = [pool.submit(timed, n) for n in range(REQUESTS)]
        while sum(future.done() for future in asked) < REQUESTS // 4:
            time.sleep(0.01)
        killed_at = time.time()
        os.kill(before[0], signal.SIGKILL)
        answers = [future.result() for future in asked]
    failed = []
    for n, ((text, error), _) in enumerate(answers):
        if error is None:
            assert text == expected[n % 5], n
        else:
            failed.append(n)
            assert "gone" in error["message"], error
    print(f"{len(failed)} of {REQUESTS} failed")
    # Those whose answers had begun.
    assert all(started[n] < killed_at for n in failed)
    assert len(failed) <= 8
    deadline = time.time() + 60
    while len(servers()) < 2 or before[0] in servers():
        assert time.time() < deadline, "the replica was not replaced"
        time.sleep(0.2)
    deadline = time.time() + 60
    while any(ask(n)[1] for n in range(5)):
        assert time.time() < deadline
    assert [ask(n)[0] for n in range(5)] == [expected[n] for n in range(5)]


def test_requests_that_begin_alike_have_one_key():
    def key(**fields):
        return ferrum_ray.prefix_key("", json.dumps(fields).encode())

    talk = [{"role": "system", "content": "x" * 600}]
    more = talk + [{"role": "user", "content": "hi"}]
    assert key(messages=talk) == key(messages=more) != key(messages=more[1:])
    assert key(prompt="a", model="m") != key(prompt="a", model="n")
    assert key(model="m") == "" == ferrum_ray.prefix_key("", b"no json") == ferrum_ray.prefix_key("", b"[1]")
