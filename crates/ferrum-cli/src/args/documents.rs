//! Documents are a part of the program: the commands and flags that they name have to be there.

use super::command;
use clap::Command;
use std::path::{Path, PathBuf};

/// Markdown files that tell users what to type.
fn documents() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = ["README.md", "CONTRIBUTING.md", "examples/README.md"]
        .map(|name| root.join(name))
        .to_vec();
    for folder in ["docs", "docs/guides"] {
        let entries = std::fs::read_dir(root.join(folder)).expect("a folder");
        files.extend(entries.map(|entry| entry.expect("an entry").path()));
    }
    files.retain(|file| file.extension().is_some_and(|ending| ending == "md"));
    files
}

/// The code of a document: lines between fences, and what stands between backticks.
fn code(text: &str) -> Vec<String> {
    let mut fenced = false;
    let mut code = Vec::new();
    for line in text.replace("\\\n", " ").lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if fenced {
            let typed = line.trim_start().trim_start_matches("$ ");
            code.push(typed.split(" #").next().unwrap_or(typed).to_owned());
        } else {
            code.extend(line.split('`').skip(1).step_by(2).map(str::to_owned));
        }
    }
    code
}

/// What is wrong with a command line that a document has.
fn fault(words: &[&str]) -> Option<String> {
    let program = command();
    let mut called: &Command = &program;
    let mut flags: Vec<_> = flags_of(called);
    for word in words {
        if let Some(flag) = word.strip_prefix("--") {
            let name = flag.split(['=', ',', ')', '…', '"', '\'']).next()?;
            let builtin = ["help", "version", ""].contains(&name);
            if !builtin && !flags.iter().any(|known| known == name) {
                return Some(format!("{} has no flag --{name}", called.get_name()));
            }
        } else if let Some(next) = called.find_subcommand(word) {
            flags.extend(flags_of(next));
            called = next;
        } else if called.get_name() == "ferrum" {
            let placeholder = word.chars().all(|c| c.is_uppercase() || c == '…');
            return (!placeholder).then(|| format!("there is no command {word}"));
        }
    }
    None
}

fn flags_of(command: &Command) -> Vec<String> {
    let names = command.get_arguments().filter_map(|arg| arg.get_long());
    names.map(str::to_owned).collect()
}

#[test]
fn documents_name_what_there_is() {
    let mut calls = 0;
    for file in documents() {
        let text = std::fs::read_to_string(&file).expect("a text");
        for line in code(&text) {
            let mut words = line.split_whitespace().peekable();
            // Before the program: `time`, `sudo`, a variable.
            while words
                .next_if(|word| *word != "ferrum" && !word.starts_with('-'))
                .is_some()
            {}
            if words.next() != Some("ferrum") {
                continue;
            }
            let typed: Vec<_> = words
                .take_while(|word| !["|", "<", ">", "&&", "||", ";"].contains(word))
                .collect();
            calls += 1;
            let fault = fault(&typed);
            assert_eq!(fault, None, "{}: {line}", file.display());
        }
    }
    assert!(calls > 100, "{calls}");
}
