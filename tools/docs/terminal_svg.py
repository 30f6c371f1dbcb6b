"""Records a session of `ferrum run` on a terminal as a picture: docs/images/terminal.svg.

    python tools/docs/terminal_svg.py target/release/ferrum docs/images/terminal.svg

The session runs for real, under tmux, with the demo model; what the screen then shows, colours included, becomes an
SVG of text by `rich` (15). Both have to be installed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 76, 24
# Typed one after the other, each when the screen has come to rest.
LINES = [
    "ferrum run --seed 1",
    "What is 7 plus 5?",
    "What is the capital of France?",
    "Tell me a story about a fox.",
]
# How long a screen does not change when it has come to rest, and how long it is waited for, in seconds.
REST, PATIENCE = 1.5, 60

# Rich's own template without fonts of another site, which pictures in documents may not load.
TEMPLATE = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width;
}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


class Terminal:
    """A tmux server of its own."""

    def __init__(self, folder: Path) -> None:
        self.server = f"ferrum-picture-{os.getpid()}"
        start = folder / "bashrc"
        start.write_text(f"PS1='$ '\nPATH='{folder}':$PATH\nHOME='{folder}'\n", encoding="utf-8")
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        self.tmux("-f", "/dev/null", "new-session", "-d", *size, f"bash --noprofile --rcfile '{start}'")

    def tmux(self, *arguments: str) -> str:
        command = ["tmux", "-L", self.server, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def screen(self) -> str:
        return self.tmux("capture-pane", "-e", "-p")

    def rest(self) -> str:
        """The screen when it has not changed for a while."""
        begin = changed = time.monotonic()
        screen = self.screen()
        while time.monotonic() - changed < REST:
            if time.monotonic() - begin > PATIENCE:
                sys.exit(f"error: the screen still changes after {PATIENCE} s")
            time.sleep(0.1)
            before, screen = screen, self.screen()
            if screen != before:
                changed = time.monotonic()
        return screen

    def type(self, line: str) -> None:
        self.tmux("send-keys", "-l", line)
        self.tmux("send-keys", "Enter")

    def end(self) -> None:
        self.tmux("kill-server")


def record(ferrum: Path) -> str:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.joinpath("ferrum").symlink_to(ferrum.resolve())
        terminal = Terminal(folder)
        try:
            terminal.rest()
            for line in LINES:
                terminal.type(line)
                terminal.rest()
            return terminal.screen()
        finally:
            terminal.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ferrum", type=Path, help="the program")
    parser.add_argument("out", type=Path, help="the SVG to write")
    options = parser.parse_args()
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w", encoding="utf-8"), force_terminal=True)
    console.print(Text.from_ansi(record(options.ferrum).rstrip("\n")))
    console.save_svg(str(options.out), title="ferrum run", code_format=TEMPLATE, unique_id="ferrum")


if __name__ == "__main__":
    main()
