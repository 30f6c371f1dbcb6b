"""What `claude_code.py` and `codex.py` have in common: a task with a scripted model, and what has to come of it.

The model is `crates/ferrum-server/examples/scripted`: the real server and engine, with a model that says what a script
has it say. So an agent runs its own loop, with its own prompts and tools, to an end that is known.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import contextmanager
from pathlib import Path

CONTEXT = 32768
# What is in the file before and after, and what the agent is told. The words stand nowhere else.
BEFORE, AFTER = "heliotrope", "marigold"
TASK = f"In colours.txt, replace {BEFORE} by {AFTER}, and write the number of its words to words.txt."
FILE = f"blue\n{BEFORE}\ngreen\n"
# What the model says instead of a long conversation, and after it.
SUMMARY = "<summary>The colours were counted, and nothing is left to do.</summary>"
# The longest that a run of an agent may take.
PATIENCE = 300


def arguments(program, package):
    """The arguments of a client; ends it, with success, where what it needs is not there."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__.splitlines()[0])
    parser.add_argument("--program", default=program, help=f"the agent (default: {program} on PATH, of the npm package {package})")
    parser.add_argument("--scripted", help="the program `scripted` (cargo build --package ferrum-server --example scripted)")
    parser.add_argument("--demo", help="URL of a server with the demo model and its context of 1024 tokens")
    read = parser.parse_args()
    read.program = shutil.which(read.program)
    if not read.program:
        skip(f"there is no program {program}; npm install -g {package}")
    if not (read.scripted or read.demo):
        parser.error("expected --scripted, --demo or both")
    if read.scripted and not Path(read.scripted).exists():
        print(f"skipped: tasks: there is no {read.scripted}; cargo build --package ferrum-server --example scripted")
        read.scripted = None
    version = subprocess.run([read.program, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False)
    if version.returncode:
        skip(f"{read.program} --version: {version.stderr.strip()}")
    print(version.stdout.strip())
    return read


def skip(why):
    print(f"skipped: {why}")
    sys.exit(0)


@contextmanager
def scripted(program, turns, otherwise='{"title": "Colours"}'):
    """The address of a server whose model answers the task with `turns`, and what else an agent asks with `otherwise`."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.json"
        script.write_text(json.dumps({"task": BEFORE, "turns": turns, "otherwise": otherwise}))
        command = [program, script, "--context", str(CONTEXT)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            address = server.stdout.readline().strip()
            assert address.startswith("http://"), f"{program} said no address"
            yield address
        finally:
            server.terminate()
            assert server.wait(timeout=60) == 0, "the scripted server did not end well"


def call(name, arguments):
    """A call of a tool as the scripted model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextmanager
def work_folder():
    """A folder with the file of the task, and one that is the home of the agent."""
    with tempfile.TemporaryDirectory() as folder:
        work, home = Path(folder) / "work", Path(folder) / "home"
        work.mkdir()
        home.mkdir()
        (work / "colours.txt").write_text(FILE)
        yield work, home


def run(command, work, home, environment):
    """Runs an agent with nothing in its environment but what is said: no keys, no proxies, no settings of others."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **environment}
    return subprocess.run(command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=PATIENCE, check=False)


def check_task(work, ran, url, route):
    """The file was read, edited and counted, the answer reached stdout, and the server refused nothing."""
    said = f"{ran.stdout}\n{ran.stderr}"
    assert ran.returncode == 0, said
    assert (work / "colours.txt").read_text() == FILE.replace(BEFORE, AFTER), said
    assert (work / "words.txt").read_text().split()[0] == "3", said
    # The model repeats what tools said: first the file, at the end the command.
    texts = list(strings([json.loads(line) for line in ran.stdout.splitlines()]))
    assert any(text.startswith("I read:") and BEFORE in text for text in texts), said
    assert any(re.match(r"It has so many words:.*\b3$", text, re.DOTALL) for text in texts), said
    statuses = answered(url)
    # A side request, such as one for a title, may be given up at the end, which is counted as 499.
    assert all(status < 400 or status == 499 for _, status in statuses), statuses
    assert statuses.get((route, 200), 0) >= 3, statuses


def check_compaction(ran, url, route, refusals, answers=(SUMMARY,)):
    """The agent had its conversation summed up when it no longer fitted, after one of so many refusals, and went on to an
    answer: that of the script where the new prompt ends with the task, else the summary."""
    said = f"{ran.stdout}\n{ran.stderr}"
    assert ran.returncode == 0, said
    assert ran.stdout.rstrip().endswith(answers), said
    statuses = answered(url)
    assert statuses.get((route, 400), 0) in refusals, statuses
    assert all(status < 400 or status in (400, 499) for _, status in statuses), statuses


def strings(value):
    """All texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings(inner)


def check_refusal(ran, words, url, route, before):
    """The agent ended by itself, showing `words` to its user, after being refused for the length of its prompt."""
    said = f"{ran.stdout}\n{ran.stderr}"
    assert ran.returncode != 0, said
    for word in words:
        assert re.search(word, said), said
    now = answered(url)
    new = {key: count - before.get(key, 0) for key, count in now.items() if count > before.get(key, 0)}
    refused = {key: count for key, count in new.items() if key[1] >= 400}
    assert list(refused) == [(route, 400)], new


def run_checks(read, task, compaction, refusal):
    """Runs what there is a server for."""
    for check, wanted in ((task, read.scripted), (compaction, read.scripted), (refusal, read.demo)):
        if wanted:
            check(read)
            print(f"{check.__name__}: ok", flush=True)


def answered(url):
    """How many requests were answered, by route and status."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        text = reply.read().decode()
    counts = {}
    line = r'^http_requests_total\{handler="(.*?)",method=".*?",status="(\d+)"\} (\d+)'
    for route, status, count in re.findall(line, text, re.MULTILINE):
        counts[route, int(status)] = counts.get((route, int(status)), 0) + int(count)
    return counts
