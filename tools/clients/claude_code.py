"""Runs Claude Code against Ferrum: `python tools/clients/claude_code.py [--scripted PROGRAM] [--demo URL] [--program CLAUDE]`.

With a scripted model of 32 k context it does a whole task: it reads a file, edits it and runs a command; and it sums up a
conversation that no longer fits. The demo model's context does not hold its instructions, and it has to say so. Needs the
npm package `@anthropic-ai/claude-code`.
"""

from agent_task import (
    AFTER, BEFORE, SUMMARY, TASK, answered, arguments, call, check_compaction, check_refusal, check_task, run, run_checks,
    scripted, work_folder,
)

# What a user sets, beside the address and the model. It has no telemetry, updates and error reports then.
SETTINGS = {
    "ANTHROPIC_AUTH_TOKEN": "none",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    # Permissions may be skipped as root only where there is nothing to lose.
    "IS_SANDBOX": "1",
}
ROUTE = "/v1/messages"


def claude(read, url, model, work, home, *words):
    models = {f"ANTHROPIC_{name}MODEL": model for name in ("", "DEFAULT_OPUS_", "DEFAULT_SONNET_", "DEFAULT_HAIKU_")}
    command = [read.program, "--dangerously-skip-permissions", *words]
    return run(command, work, home, {"ANTHROPIC_BASE_URL": url, **SETTINGS, **models})


def task(read):
    with work_folder() as (work, home):
        file = str(work / "colours.txt")
        edit = {"file_path": file, "old_string": BEFORE, "new_string": AFTER}
        count = {"command": "wc -w < colours.txt | tee words.txt", "description": "Count words"}
        turns = [
            "<think>The file comes first.</think>I look at the file." + call("Read", {"file_path": file}),
            # Two calls at once.
            "I read: {last_result}" + call("Edit", edit) + "\n" + call("Bash", count),
            "It has so many words: {last_result}",
        ]
        with scripted(read.scripted, turns) as url:
            ran = claude(read, url, "scripted", work, home, "-p", TASK, "--output-format", "stream-json", "--verbose")
            check_task(work, ran, url, ROUTE)


def compaction(read):
    """Claude Code does not know that the context is short before it is refused; then it sums up and tries again."""
    # Each exchange adds more than a thousand tokens, until one of them does not fit.
    count = call("Bash", {"command": "seq 1 500", "description": "Count"})
    exchanges = 30
    with work_folder() as (work, home), scripted(read.scripted, [count, "Counted."] * exchanges, SUMMARY) as url:
        for goes_on in [[], *[["-c"]] * (exchanges - 1)]:
            ran = claude(read, url, "scripted", work, home, *goes_on, "-p", TASK)
            if answered(url).get((ROUTE, 400)):
                break
            assert ran.stdout.strip() == "Counted.", ran
        # The first requests for the summary may have too much in them, too.
        check_compaction(ran, url, ROUTE, refusals=[1, 2, 3], answers=("Counted.", SUMMARY))


def refusal(read):
    before = answered(read.demo)
    with work_folder() as (work, home):
        ran = claude(read, read.demo, "ferrum-demo", work, home, "-p", TASK)
        # It takes the numbers out of the refusal.
        check_refusal(ran, ["Prompt is too long", "limit 1024"], read.demo, ROUTE, before)


run_checks(arguments("claude", "@anthropic-ai/claude-code"), task, compaction, refusal)
