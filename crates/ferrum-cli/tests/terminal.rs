//! The chat session as somebody at a terminal meets it: typed keys in, a screen out.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// A terminal of its own, in a `tmux` server of its own.
struct Terminal {
    server: String,
}

impl Terminal {
    /// Runs `ferrum` with `args`; `None` where there is no tmux.
    fn start(name: &str, args: &str) -> Option<Self> {
        Command::new("tmux").arg("-V").output().ok()?;
        let server = format!("ferrum-{name}-{}", std::process::id());
        let terminal = Self { server };
        // The shell stays after the program has ended, so that the screen can still be read.
        let command = format!(
            "{} {args}; echo left with $?; sleep 60",
            env!("CARGO_BIN_EXE_ferrum")
        );
        terminal.tmux(&[
            "-f",
            "/dev/null",
            "new-session",
            "-d",
            "-x",
            "120",
            "-y",
            "40",
            &command,
        ]);
        Some(terminal)
    }

    fn tmux(&self, args: &[&str]) -> String {
        let output = Command::new("tmux")
            .args(["-L", &self.server])
            .args(args)
            .output()
            .unwrap();
        assert!(output.status.success(), "tmux {args:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn keys(&self, keys: &[&str]) {
        self.tmux(&[&["send-keys"], keys].concat());
    }

    /// Waits until the screen holds what `found` looks for.
    fn wait_for(&self, what: &str, found: impl Fn(&str) -> bool) -> String {
        let begin = Instant::now();
        loop {
            let screen = self.tmux(&["capture-pane", "-p"]);
            if found(&screen) {
                return screen;
            }
            assert!(
                begin.elapsed() < Duration::from_secs(120),
                "no {what} on the screen:\n{screen}"
            );
            sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = Command::new("tmux")
            .args(["-L", &self.server, "kill-server"])
            .output();
    }
}

/// Whether the last line is an empty prompt.
fn asks(screen: &str) -> bool {
    screen.trim_end().ends_with('>')
}

#[test]
fn a_chat_remembers_lines_and_ends_with_ctrl_d() {
    let Some(terminal) = Terminal::start("chat", "run --temperature 0") else {
        println!("skipped: tmux is not installed");
        return;
    };
    terminal.wait_for("prompt", asks);
    terminal.keys(&["What is 7 plus 5?", "Enter"]);
    terminal.wait_for("answer", |screen| screen.contains("12") && asks(screen));
    // The line before comes back, and can be edited.
    terminal.keys(&["Up"]);
    terminal.wait_for("line from history", |screen| {
        screen.trim_end().ends_with("> What is 7 plus 5?")
    });
    terminal.keys(&["BSpace", "BSpace", "2?"]);
    terminal.wait_for("edited line", |screen| {
        screen.trim_end().ends_with("> What is 7 plus 2?")
    });
    // Ctrl-C drops a line that is being typed.
    terminal.keys(&["C-c"]);
    terminal.wait_for("empty prompt", asks);
    terminal.keys(&["C-d"]);
    terminal.wait_for("end", |screen| screen.contains("left with 0"));
}

#[test]
fn ctrl_c_stops_the_answer_and_not_the_program() {
    // The slowest backend leaves time for the key.
    let args = "run --temperature 0 --backend reference --threads 1";
    let Some(terminal) = Terminal::start("stop", args) else {
        println!("skipped: tmux is not installed");
        return;
    };
    terminal.wait_for("prompt", asks);
    terminal.keys(&["Tell me a story about a fox.", "Enter"]);
    terminal.wait_for("begin of the story", |screen| screen.contains("Once"));
    terminal.keys(&["C-c"]);
    let screen = terminal.wait_for("stop", |screen| {
        screen.contains("[stopped]") && asks(screen)
    });
    assert!(!screen.contains("left with"), "{screen}");
    terminal.keys(&["/quit", "Enter"]);
    terminal.wait_for("end", |screen| screen.contains("left with 0"));
}
