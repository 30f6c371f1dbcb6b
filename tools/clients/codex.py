"""Runs Codex CLI against Ferrum: `python tools/clients/codex.py [--scripted PROGRAM] [--demo URL] [--program CODEX]`.

With a scripted model of 32 k context it does a whole task: it reads a file, patches it and runs a command; and it sums up
a conversation before it no longer fits. The demo model's context does not hold its instructions, and it has to say so.
Needs the npm package `@openai/codex`.
"""

import json

from agent_task import (
    AFTER, BEFORE, CONTEXT, SUMMARY, TASK, answered, arguments, call, check_compaction, check_refusal, check_task, run,
    run_checks, scripted, work_folder,
)

# What a user writes to ~/.codex/config.toml.
CONFIG = """\
model = "{model}"
model_provider = "ferrum"
model_context_window = {context}
web_search = "disabled"
check_for_update_on_startup = false

[model_providers.ferrum]
name = "Ferrum"
base_url = "{url}/v1"
wire_api = "responses"

[analytics]
enabled = false
"""
ROUTE = "/v1/responses"


def codex(read, url, model, context, work, home):
    settings = home / ".codex"
    settings.mkdir()
    (settings / "config.toml").write_text(CONFIG.format(url=url, model=model, context=context))
    # Its sandbox needs rights that containers do not have.
    command = [read.program, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json", TASK]
    return run(command, work, home, {})


def task(read):
    patch = f"*** Begin Patch\n*** Update File: colours.txt\n@@\n blue\n-{BEFORE}\n+{AFTER}\n green\n*** End Patch"
    turns = [
        "<think>The file comes first.</think>I look at the file." + call("exec_command", {"cmd": "cat colours.txt"}),
        "I read: {last_result}" + call("exec_command", {"cmd": f"apply_patch <<'EOF'\n{patch}\nEOF"}),
        call("exec_command", {"cmd": "wc -w < colours.txt | tee words.txt"}),
        "It has so many words: {last_result}",
    ]
    with work_folder() as (work, home), scripted(read.scripted, turns) as url:
        ran = codex(read, url, "scripted", CONTEXT, work, home)
        check_task(work, ran, url, ROUTE)


def compaction(read):
    """Codex knows the length of the context from its settings, and counts with what the server says of its prompts."""
    count = call("exec_command", {"cmd": "seq 1 6000", "max_output_tokens": 20000})
    with work_folder() as (work, home), scripted(read.scripted, [count] * 4, SUMMARY) as url:
        ran = codex(read, url, "scripted", CONTEXT, work, home)
        events = [json.loads(line) for line in ran.stdout.splitlines()]
        said = [event["item"]["text"] for event in events if event.get("item", {}).get("type") == "agent_message"]
        ran.stdout = said[-1] if said else ran.stdout
        # The request for the summary has the last result in it, and may be refused; then the oldest goes first.
        check_compaction(ran, url, ROUTE, refusals=[0, 1])


def refusal(read):
    before = answered(read.demo)
    with work_folder() as (work, home):
        ran = codex(read, read.demo, "ferrum-demo", 1024, work, home)
        # Its own words for the code `context_length_exceeded`.
        check_refusal(ran, ["ran out of room in the model's context window"], read.demo, ROUTE, before)


run_checks(arguments("codex", "@openai/codex"), task, compaction, refusal)
