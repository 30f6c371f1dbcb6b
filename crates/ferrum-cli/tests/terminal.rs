//! The chat session on a terminal: typed keys in, a screen out.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use ferrum_test_support::skip;
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A terminal of its own, in a `tmux` server of its own, with a home of its own.
struct Terminal {
    server: String,
    home: TempDir,
}

impl Terminal {
    /// Runs `ferrum` with `args`; `None` where there is no tmux.
    fn start(name: &str, args: &str) -> Option<Self> {
        Self::sized(name, args, 120)
    }

    fn sized(name: &str, args: &str, columns: usize) -> Option<Self> {
        if Command::new("tmux").arg("-V").output().is_err() {
            skip("tmux is not installed");
            return None;
        }
        let server = format!("ferrum-{name}-{}", std::process::id());
        let home = tempfile::tempdir().unwrap();
        let terminal = Self { server, home };
        // A light background, and the shell stays after the program has ended, so that the screen can
        // still be read.
        let command = format!(
            "cd {home}; export COLORFGBG='0;15' XDG_STATE_HOME={home}; {} {args}; echo left with $?; sleep 60",
            env!("CARGO_BIN_EXE_ferrum"),
            home = terminal.home.path().display(),
        );
        let columns = columns.to_string();
        let size = ["-x", &columns, "-y", "40"];
        let start = ["-f", "/dev/null", "new-session", "-d"];
        terminal.tmux(&[&start[..], &size, &[&command]].concat());
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

    /// Puts a text in as a terminal does it with what is pasted.
    fn paste(&self, text: &str) {
        self.tmux(&["set-buffer", "--", text]);
        self.tmux(&["paste-buffer", "-p"]);
    }

    /// Waits until the screen holds what `found` looks for.
    fn wait_for(&self, what: &str, found: impl Fn(&str) -> bool) -> String {
        let begin = Instant::now();
        loop {
            // What has gone over the upper edge as well.
            let screen = self.tmux(&["capture-pane", "-p", "-S", "-500"]);
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

    /// Types a line as the `n`th, and waits for the prompt after what it brings.
    fn enter(&self, n: usize, line: &str) -> String {
        self.tmux(&["send-keys", "-l", line]);
        self.wait_for("typed line", |screen| {
            screen
                .split_whitespace()
                .collect::<String>()
                .contains(&line.split_whitespace().collect::<String>())
        });
        self.keys(&["Enter"]);
        self.prompted(n + 1)
    }

    /// Waits for the `n`th prompt.
    fn prompted(&self, n: usize) -> String {
        self.wait_for("next prompt", |screen| {
            let prompts = screen.lines().filter(|line| line.starts_with('>'));
            prompts.count() >= n && asks(screen)
        })
    }

    /// A file that was saved beside the program.
    fn saved(&self, name: &str) -> Value {
        let text = std::fs::read_to_string(self.home.path().join(name)).unwrap();
        serde_json::from_str(&text).unwrap()
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
        return;
    };
    terminal.wait_for("prompt", asks);
    terminal.keys(&["What is 7 plus 5?", "Enter"]);
    let screen = terminal.wait_for("answer", |screen| screen.contains("12") && asks(screen));
    // Without --verbose, there are no speed figures.
    assert!(!screen.contains("tokens/s"), "{screen}");
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
    let screen = terminal.wait_for("empty prompt", asks);
    assert!(!screen.contains("/bye leaves"), "{screen}");
    terminal.keys(&["C-c"]);
    terminal.wait_for("way out", |screen| {
        screen.contains("Ctrl-D or /bye leaves") && asks(screen)
    });
    terminal.keys(&["C-d"]);
    terminal.wait_for("end", |screen| screen.contains("left with 0"));
    // What was asked is the user's alone.
    let history = terminal.home.path().join("ferrum/history");
    let mode = std::fs::metadata(&history).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let history = std::fs::read_to_string(history).unwrap();
    // Its first line is the format.
    assert_eq!(history, "#V2\nWhat is 7 plus 5?\n");
}

#[test]
fn six_turns_in_a_row_keep_to_the_point() {
    let Some(terminal) = Terminal::start("turns", "run --temperature 0") else {
        return;
    };
    let turns = [
        ("My name is Clara.", "Nice to meet you, Clara!"),
        ("What is 7 plus 5?", "7 plus 5 is 12."),
        ("Tell me a story about a fox.", "fox named"),
        ("What color is a banana?", "A banana is yellow."),
        ("Count from 3 to 9.", "3, 4, 5, 6, 7, 8, 9."),
        ("What is my name?", "Your name is Clara."),
    ];
    terminal.prompted(1);
    for (n, (said, expected)) in turns.into_iter().enumerate() {
        let screen = terminal.enter(n + 1, said);
        assert!(screen.contains(expected), "{said}: {screen}");
    }
}

#[test]
fn ctrl_c_stops_the_answer_and_not_the_program() {
    // The slowest backend leaves time for the key.
    let args = "run --temperature 0 --backend reference --threads 1";
    let Some(terminal) = Terminal::start("stop", args) else {
        return;
    };
    terminal.wait_for("prompt", asks);
    terminal.keys(&["Tell me a story about a fox.", "Enter"]);
    terminal.wait_for("begin of the story", |screen| screen.contains("Once"));
    terminal.keys(&["C-c"]);
    // The terminal's own `^C` may push what comes behind it over the margin.
    let screen = terminal.wait_for("stop", |screen| {
        screen.replace('\n', "").contains("[stopped]") && asks(screen)
    });
    assert!(!screen.contains("left with"), "{screen}");
    terminal.keys(&["/quit", "Enter"]);
    terminal.wait_for("end", |screen| screen.contains("left with 0"));
}

#[test]
fn what_is_pasted_or_quoted_is_one_message() {
    let Some(terminal) = Terminal::start("paste", "run --temperature 0 -n 8") else {
        return;
    };
    terminal.wait_for("prompt", asks);
    terminal.paste("first line\n/bye\nlast line");
    terminal.wait_for("pasted text", |screen| screen.contains("last line"));
    terminal.keys(&["Enter"]);
    terminal.prompted(2);
    // Enter goes on inside of quotes.
    terminal.keys(&["\"\"\"one", "Enter", "two\"\"\"", "Enter"]);
    terminal.prompted(3);
    terminal.enter(3, "/save ./talk.json");
    let talk = terminal.saved("talk.json");
    let messages = talk["messages"].as_array().unwrap();
    assert_eq!(messages.len(), 4, "{talk}");
    assert_eq!(messages[0]["content"], "first line\n/bye\nlast line");
    assert_eq!(messages[2]["content"], "one\ntwo");
    // A conversation goes on in another one.
    terminal.enter(4, "/clear");
    let screen = terminal.enter(5, "/load ./talk.json");
    assert!(screen.contains("loaded 2 turns"), "{screen}");
    terminal.keys(&["/bye", "Enter"]);
    terminal.wait_for("end", |screen| screen.contains("left with 0"));
}

#[test]
fn a_full_context_ends_no_talk() {
    let args = "run --temperature 0 --context 128 -n 24 --system 'You are kind.'";
    let Some(terminal) = Terminal::start("full", args) else {
        return;
    };
    terminal.wait_for("prompt", asks);
    for (turn, question) in [
        "What is 7 plus 5?",
        "Tell me a story about a fox.",
        "What is 3 plus 4?",
        "Tell me a story about a cat.",
        "What is 2 plus 2?",
        "What is 7 plus 5?",
    ]
    .into_iter()
    .enumerate()
    {
        terminal.enter(turn + 1, question);
    }
    let long = "What is 7 plus 5? ".repeat(40);
    terminal.paste(&long);
    terminal.wait_for("pasted text", |screen| {
        screen.matches("plus 5").count() > 30
    });
    terminal.keys(&["Enter"]);
    let screen = terminal.prompted(8);
    let full = "note: the context of 128 tokens is full: the oldest";
    assert!(screen.contains(full), "{screen}");
    assert!(screen.contains("no longer seen"), "{screen}");
    assert!(screen.contains("error: the message takes"), "{screen}");
    assert!(screen.contains("and the context holds 128"), "{screen}");
    terminal.enter(8, "What is 7 plus 5?");
    terminal.enter(9, "/save ./talk.json");
    // Six turns and the one after the error are there, though not all are seen.
    let talk = terminal.saved("talk.json");
    let messages = talk["messages"].as_array().unwrap();
    assert_eq!(messages.len(), 1 + 2 * 7, "{talk}");
    assert_eq!(messages[0]["content"], "You are kind.");
    // An answer runs into the end of the context, and the talk goes on.
    terminal.enter(10, "/set max_tokens none");
    terminal.enter(11, "Tell me a story about a fox.");
    let screen = terminal.enter(12, "What is 7 plus 5?");
    assert!(!screen.contains("left with"), "{screen}");
}

#[test]
fn settings_and_help_are_there_and_typed_text_has_no_color() {
    let Some(terminal) = Terminal::start("set", "run --temperature 0 --color always") else {
        return;
    };
    terminal.wait_for("prompt", asks);
    let screen = terminal.enter(1, "/help");
    for text in ["/set NAME VALUE", "/save NAME", "Alt-Enter", "Ctrl-D"] {
        assert!(screen.contains(text), "{text}\n{screen}");
    }
    terminal.enter(2, "/set verbose");
    terminal.enter(3, "/set seed 12345");
    let screen = terminal.enter(4, "/set");
    assert!(screen.contains("seed           12345"), "{screen}");
    let screen = terminal.enter(5, "/set tone sharp");
    assert!(screen.contains("there is no setting \"tone\""), "{screen}");
    let screen = terminal.enter(6, "What is 7 plus 5?");
    assert!(
        screen.contains("12") && screen.contains("tokens/s"),
        "{screen}"
    );
    // On any background, the terminal's own colours can be read.
    terminal.tmux(&["send-keys", "-l", "typed text"]);
    terminal.wait_for("typed text", |screen| screen.contains("typed text"));
    let screen = terminal.tmux(&["capture-pane", "-p", "-e"]);
    let line = screen.lines().find(|line| line.contains("typed text"));
    let codes = line.unwrap().split('\u{1b}').skip(1);
    for code in codes {
        assert!(
            code.starts_with("[39m") || code.starts_with("[0m"),
            "{code:?}"
        );
    }
}

#[test]
fn words_are_not_broken_at_the_margin() {
    let Some(terminal) = Terminal::sized("wrap", "run --temperature 0 -n 120", 40) else {
        return;
    };
    terminal.wait_for("prompt", asks);
    terminal.enter(1, "Tell me a story about a fox.");
    let screen = terminal.enter(2, "/save ./talk.json");
    let talk = terminal.saved("talk.json");
    let answer = talk["messages"][1]["content"].as_str().unwrap();
    assert!(answer.len() > 80, "{answer}");
    let shown: Vec<_> = screen.split_whitespace().collect();
    let said: Vec<_> = answer.split_whitespace().collect();
    assert!(
        shown.windows(said.len()).any(|words| words == said),
        "{answer}\n{screen}"
    );
    // What is said beside answers is not broken either.
    terminal.enter(3, "/set verbose");
    terminal.enter(4, "What is 7 plus 5?");
    terminal.enter(5, "/set tone sharp");
    let screen = terminal.enter(6, "/load nothing");
    let shown = screen.split_whitespace().collect::<Vec<_>>().join(" ");
    for words in [
        "tokens/s | first token after 0.",
        "hint: /set knows temperature, top_k, top_p, min_p, repeat_penalty, seed, max_tokens, system and verbose",
        "there is no conversation \"nothing\" hint: /save NAME keeps one",
    ] {
        assert!(shown.contains(words), "{words}\n{screen}");
    }
}
