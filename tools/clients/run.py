"""Runs all clients against a server that it starts: `python tools/clients/run.py [FERRUM]`.

FERRUM is the program (default: target/release/ferrum), beside which is `examples/scripted`. A client whose package is not
installed says `skipped: why`.
Ends with 1 if one of them fails.
"""

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PROGRAM = sys.argv[1] if len(sys.argv) > 1 else "target/release/ferrum"

# Each with its arguments, in which URL stands for the server's address, PROGRAM for FERRUM, and SCRIPTED for the program
# that serves a scripted model.
CLIENTS = [
    ("openai_client.py", ["URL/v1"]),
    ("anthropic_client.py", ["URL"]),
    ("agents_client.py", ["URL"]),
    ("chat_page.py", ["URL"]),
    ("claude_code.py", ["--demo", "URL", "--scripted", "SCRIPTED"]),
    ("codex.py", ["--demo", "URL", "--scripted", "SCRIPTED"]),
    ("encoders_client.py", ["PROGRAM"]),
]


def main():
    command = [PROGRAM, "serve", "--port", "0", "--log-level", "warn"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        address = None
        for line in server.stderr:
            if found := re.search(r"http://[0-9.:]+", line):
                address = found.group()
                break
        if not address:
            sys.exit(f"{PROGRAM} serve said no address")
        failed = [name for name, arguments in CLIENTS if not run(name, arguments, address)]
    finally:
        server.terminate()
        server.wait(timeout=60)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def run(name, arguments, address):
    print(f"== {name}", flush=True)
    scripted = str(Path(PROGRAM).parent / "examples" / "scripted")
    words = {"URL": address, "SCRIPTED": scripted, "PROGRAM": PROGRAM}
    for word, value in words.items():
        arguments = [argument.replace(word, value) for argument in arguments]
    return subprocess.run([sys.executable, str(HERE / name), *arguments], check=False).returncode == 0


main()
