//! Conversations in files, for `/save` and `/load`, and where the chat keeps what outlives it.
//!
//! A file may come from anywhere, so it is bounded and checked before anything of it is used. Only the user
//! can read the files.

use super::conversation::{Conversation, Turn};
use super::settings::Settings;
use crate::failure::{Failure, Outcome};
use crate::input;
use serde_json::{Value, json};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

/// The layout of files, which later ones may change.
const VERSION: u64 = 1;

/// The key that says so, and that a file is one of these.
const MARK: &str = "ferrum_chat";

/// A conversation from a file.
#[derive(Debug)]
pub(super) struct SavedChat {
    /// The model that it was with.
    pub(super) model: String,
    pub(super) settings: Settings,
    pub(super) conversation: Conversation,
}

/// The folder for what outlives the program.
pub(super) fn state_dir() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let state = variable("XDG_STATE_HOME").map(PathBuf::from);
    let state = state.or_else(|| Some(std::env::home_dir()?.join(".local/state")));
    Some(state?.join("ferrum"))
}

/// The file of a conversation: a path where it looks like one, else a name in the state folder.
pub(super) fn file_of(name: &str) -> Outcome<PathBuf> {
    if name.is_empty() {
        return Err(Failure::new(
            "found no name\nhint: /save NAME keeps the conversation for /load NAME; a path works too",
        ));
    }
    if name.contains(['/', '\\']) || name.ends_with(".json") {
        return Ok(PathBuf::from(name));
    }
    let fine = |c: char| c.is_alphanumeric() || "-_. ".contains(c);
    if name.starts_with('.') || !name.chars().all(fine) {
        return Err(Failure::new(format!(
            "found {name:?}, expected a name of letters, digits, spaces, \"-\", \"_\" and \".\""
        )));
    }
    let dir = named_dir().ok_or_else(|| {
        Failure::new("no home is known for names\nhint: give a path such as ./talk.json")
    })?;
    Ok(dir.join(format!("{name}.json")))
}

/// The folder of conversations that have a name.
fn named_dir() -> Option<PathBuf> {
    Some(state_dir()?.join("conversations"))
}

/// The file of a conversation that was kept.
///
/// # Errors
/// There is none; the names that there are are said.
pub(super) fn kept(name: &str) -> Outcome<PathBuf> {
    let path = file_of(name)?;
    if path.exists() {
        return Ok(path);
    }
    let hint = match names().as_slice() {
        [] => "/save NAME keeps one".to_owned(),
        names => format!("there are {}", names.join(", ")),
    };
    Err(Failure::new(format!(
        "there is no conversation {name:?}\nhint: {hint}"
    )))
}

/// The names of conversations, sorted.
fn names() -> Vec<String> {
    let files = named_dir().and_then(|dir| fs::read_dir(dir).ok());
    let name = |file: fs::DirEntry| {
        let path = PathBuf::from(file.file_name());
        let is_one = path.extension().is_some_and(|ending| ending == "json");
        let name = path.file_stem()?.to_str()?;
        is_one.then(|| format!("{name:?}"))
    };
    let files = files.into_iter().flatten().flatten();
    let mut names: Vec<_> = files.filter_map(name).collect();
    names.sort();
    names
}

/// Writes a conversation, in place of one that was there; other files are not written over.
pub(super) fn save(
    path: &Path,
    model: &str,
    settings: &Settings,
    conversation: &Conversation,
) -> Outcome {
    let failed = |e: std::io::Error| Failure::new(format!("{}: {e}", path.display()));
    if path.exists() && read(path).is_err() {
        let path = path.display();
        return Err(Failure::new(format!(
            "{path} is there, and is no conversation\nhint: choose another name"
        )));
    }
    if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
        fs::create_dir_all(dir).map_err(failed)?;
    }
    let value = json!({
        MARK: VERSION,
        "model": model,
        "settings": settings.to_json(),
        "messages": conversation.all(),
    });
    let mut text = serde_json::to_string_pretty(&value)?;
    text.push('\n');
    // Whole or not at all: a full disk costs nothing that was there.
    let mut partial = path.as_os_str().to_owned();
    partial.push(format!(".{}.partial", std::process::id()));
    let partial = PathBuf::from(partial);
    let written = private_file(&partial, true)
        .and_then(|mut file| {
            file.write_all(text.as_bytes())
                .and_then(|()| file.sync_all())
        })
        .and_then(|()| fs::rename(&partial, path));
    written.map_err(|e| {
        // It may not be there.
        let _ = fs::remove_file(&partial);
        failed(e)
    })
}

/// Reads a conversation; `settings` are those where it has none.
pub(super) fn load(path: &Path, settings: &Settings) -> Outcome<SavedChat> {
    let value = read(path)?;
    let wrong = |reason: String| Failure::new(format!("{}: {reason}", path.display()));
    let settings = match value.get("settings") {
        None => settings.clone(),
        Some(Value::Object(found)) => settings.with_json(found).map_err(wrong)?,
        Some(_) => return Err(wrong("settings: expected an object".into())),
    };
    let model = value["model"].as_str().unwrap_or_default();
    Ok(SavedChat {
        model: model.to_owned(),
        settings,
        conversation: conversation(&value["messages"]).map_err(wrong)?,
    })
}

/// A file's JSON, if it is one of ours.
fn read(path: &Path) -> Outcome<Value> {
    let wrong = |reason: String| Failure::new(format!("{}: {reason}", path.display()));
    // What is no file may never end.
    let kind = fs::metadata(path).map_err(|e| wrong(e.to_string()))?;
    if !kind.is_file() {
        return Err(wrong("expected a file".into()));
    }
    let text = input::read_json_text(path)?;
    let value: Value =
        serde_json::from_str(&text).map_err(|e| wrong(format!("expected JSON: {e}")))?;
    match value.get(MARK).and_then(Value::as_u64) {
        Some(VERSION) => Ok(value),
        Some(other) => Err(wrong(format!(
            "found a conversation of version {other}, expected {VERSION}"
        ))),
        None => Err(wrong(format!(
            "expected a conversation of /save, which has {MARK:?}"
        ))),
    }
}

/// Messages of a file: maybe one of the system, then questions and answers in turns.
pub(super) fn conversation(messages: &Value) -> Result<Conversation, String> {
    let messages = messages.as_array().ok_or("messages: expected a list")?;
    let mut texts = Vec::new();
    for (i, message) in messages.iter().enumerate() {
        let role = message["role"].as_str();
        let role = role.ok_or_else(|| format!("messages[{i}].role: expected a string"))?;
        let content = message["content"].as_str();
        let content = content.ok_or_else(|| format!("messages[{i}].content: expected a string"))?;
        texts.push((role, content.to_owned()));
    }
    let mut rest = texts.into_iter().enumerate().peekable();
    let system = rest.next_if(|(_, (role, _))| *role == "system");
    let system = system.map(|(_, (_, text))| text);
    let expect = |found: Option<(usize, (&str, String))>, expected: &str| match found {
        Some((_, (role, text))) if role == expected => Ok(text),
        Some((i, (role, _))) => Err(format!(
            "messages[{i}].role: found {role:?}, expected {expected:?}"
        )),
        None => Err("messages: the last question has no answer".to_owned()),
    };
    let mut turns = Vec::new();
    while rest.peek().is_some() {
        turns.push(Turn {
            question: expect(rest.next(), "user")?,
            answer: expect(rest.next(), "assistant")?,
        });
    }
    Ok(Conversation::new(system, turns))
}

/// Opens a file that only its owner reads, empty if it is to be `fresh`.
pub(super) fn private_file(path: &Path, fresh: bool) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(fresh);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.mode(0o600);
    }
    let file = options.open(path)?;
    // One that was there keeps its mode when it is opened.
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        file.set_permissions(fs::Permissions::from_mode(0o600))?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Seed;
    use ferrum_engine::GenerationParams;

    fn settings() -> Settings {
        Settings::new(GenerationParams::default(), Seed::Fresh, false)
    }

    fn talk() -> Conversation {
        let turn = Turn {
            question: "What is \"it\"?\n".into(),
            answer: "Это 你".into(),
        };
        Conversation::new(Some("be brief".into()), vec![turn])
    }

    #[test]
    fn what_was_saved_is_loaded() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("new/talk.json");
        let mut other = settings();
        other.set("seed", "5").expect("a seed");
        for _ in 0..2 {
            save(&path, "demo", &other, &talk()).unwrap_or_else(|e| panic!("{e}"));
        }
        let saved = load(&path, &settings()).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(saved.conversation, talk());
        assert_eq!(saved.model, "demo");
        assert_eq!(saved.settings.generation().sampling.seed, 5);
        let names = fs::read_dir(dir.path().join("new")).expect("a folder");
        assert_eq!(names.count(), 1);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = fs::metadata(&path).expect("a file").permissions().mode();
            assert_eq!(mode & 0o777, 0o600);
        }
    }

    #[test]
    fn files_that_are_no_conversations_are_refused_and_kept() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("talk.json");
        let with = |messages: &str| format!("{{\"ferrum_chat\": 1, \"messages\": {messages}}}");
        let deep = with(&"[".repeat(1 << 16));
        let cases = [
            (String::new(), "expected JSON"),
            ("[1]".into(), "expected a conversation of /save"),
            ("{\"ferrum_chat\": 2}".into(), "version 2, expected 1"),
            (deep, "expected JSON"),
            (with("5"), "messages: expected a list"),
            (with("[5]"), "messages[0].role: expected a string"),
            (
                with("[{\"role\": \"user\", \"content\": 5}]"),
                "messages[0].content: expected a string",
            ),
            (
                with("[{\"role\": \"tool\", \"content\": \"x\"}]"),
                "messages[0].role: found \"tool\", expected \"user\"",
            ),
            (
                with(
                    "[{\"role\": \"user\", \"content\": \"x\"}, {\"role\": \"system\", \"content\": \"x\"}]",
                ),
                "messages[1].role: found \"system\", expected \"assistant\"",
            ),
            (
                with("[{\"role\": \"user\", \"content\": \"x\"}]"),
                "the last question has no answer",
            ),
            (
                "{\"ferrum_chat\": 1, \"messages\": [], \"settings\": {\"top_p\": \"9\"}}".into(),
                "settings: ",
            ),
        ];
        for (text, expected) in cases {
            fs::write(&path, &text).expect("a file");
            match load(&path, &settings()) {
                Ok(saved) => panic!("{text}: {saved:?}"),
                Err(e) => assert!(e.to_string().contains(expected), "{expected}: {e}"),
            }
        }
        fs::write(&path, "my notes").expect("a file");
        let error = save(&path, "demo", &settings(), &talk()).expect_err("not ours");
        assert!(error.to_string().contains("is no conversation"), "{error}");
        assert_eq!(fs::read_to_string(&path).expect("a file"), "my notes");
        assert!(load(dir.path(), &settings()).is_err());
    }

    #[test]
    fn names_stay_in_their_folder() {
        for name in ["", ".hidden", "a\nb", "a:b"] {
            assert!(file_of(name).is_err(), "{name:?}");
        }
        let file = file_of("../talk").unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(file, Path::new("../talk"));
        let file = file_of("my talk").unwrap_or_else(|e| panic!("{e}"));
        assert!(
            file.ends_with("ferrum/conversations/my talk.json"),
            "{file:?}"
        );
    }
}
