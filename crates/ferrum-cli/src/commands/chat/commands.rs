//! Lines that are no messages: they begin with a slash.

/// What `/help` says.
pub(super) const HELP: &str = "\
Commands
  /set              show the settings
  /set NAME VALUE   change one: temperature, top_k, top_p, min_p,
                    repeat_penalty, seed (-1: another for each answer),
                    max_tokens, system (the system message),
                    verbose (figures after each answer)
  /clear            forget the conversation, but for the system message
  /save NAME        keep the conversation, under a name or in a FILE.json
  /load NAME        go on with one that was kept
  /help             this list
  /bye              leave (also /quit)
Keys
  Enter             send the message
  Alt-Enter         begin a new line; three quotes (\"\"\") before and after
                    a message of several lines work too
  Ctrl-C            stop the answer, or drop the line
  Ctrl-D            leave, on an empty line
  Up, Down, Ctrl-R  earlier messages, and a search in them
  Ctrl-A, Ctrl-E    go to the beginning or the end of the line
  Ctrl-W, Ctrl-U    delete the word or the line before the cursor
  Ctrl-L            clear the screen
What is pasted becomes one message, with all its lines.";

/// Three quotes around a message of several lines.
const BLOCK: &str = "\"\"\"";

/// What a line asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Line<'a> {
    Nothing,
    Message(String),
    Help,
    Clear,
    Leave,
    /// All settings are to be shown.
    Settings,
    Set(&'a str, &'a str),
    Save(&'a str),
    Load(&'a str),
    Unknown(&'a str),
}

/// Whether a block has begun and not ended.
pub(super) fn is_open(text: &str) -> bool {
    let inside = text.trim_start().strip_prefix(BLOCK);
    inside.is_some_and(|inside| !inside.contains(BLOCK))
}

impl<'a> Line<'a> {
    pub(super) fn parse(text: &'a str) -> Self {
        let trimmed = text.trim();
        if trimmed.is_empty() {
            return Line::Nothing;
        }
        if let Some(inside) = trimmed.strip_prefix(BLOCK) {
            let (block, rest) = inside.split_once(BLOCK).unwrap_or((inside, ""));
            let block = block.strip_prefix('\n').unwrap_or(block);
            let block = block.strip_suffix('\n').unwrap_or(block);
            let message = format!("{block}{rest}");
            return match message.trim().is_empty() {
                true => Line::Nothing,
                false => Line::Message(message),
            };
        }
        let (name, rest) = trimmed.split_once(' ').unwrap_or((trimmed, ""));
        let letters = name.strip_prefix('/').unwrap_or_default();
        // Paths begin with a slash too, and a command is one line.
        let is_name = !letters.is_empty() && letters.chars().all(|c| c.is_ascii_lowercase());
        if trimmed.contains('\n') || !(is_name || name == "/?") {
            return Line::Message(text.trim_end().to_owned());
        }
        let rest = rest.trim();
        match name {
            "/help" | "/?" => Line::Help,
            "/clear" => Line::Clear,
            "/bye" | "/quit" | "/exit" => Line::Leave,
            "/set" if rest.is_empty() => Line::Settings,
            "/set" => {
                let (name, value) = rest.split_once(' ').unwrap_or((rest, ""));
                Line::Set(name, value.trim())
            }
            "/save" => Line::Save(rest),
            "/load" => Line::Load(rest),
            name => Line::Unknown(name),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_commands_or_messages() {
        let message = |text: &str| Line::Message(text.to_owned());
        let cases = [
            ("", Line::Nothing),
            ("  \n ", Line::Nothing),
            ("hello ", message("hello")),
            ("  indented", message("  indented")),
            ("one\ntwo\n", message("one\ntwo")),
            ("/help", Line::Help),
            (" /? ", Line::Help),
            ("/clear", Line::Clear),
            ("/bye", Line::Leave),
            ("/quit now", Line::Leave),
            ("/set", Line::Settings),
            ("/set top_k  5 ", Line::Set("top_k", "5")),
            ("/set system Be brief.", Line::Set("system", "Be brief.")),
            ("/set verbose", Line::Set("verbose", "")),
            ("/save my talk", Line::Save("my talk")),
            ("/load", Line::Load("")),
            ("/frobnicate", Line::Unknown("/frobnicate")),
            ("/etc/hosts is what?", message("/etc/hosts is what?")),
            ("/* a comment */", message("/* a comment */")),
            ("/set x\nand more", message("/set x\nand more")),
            ("\"\"\"\n/help\n  two\n\"\"\"", message("/help\n  two")),
            ("\"\"\"one\"\"\"", message("one")),
            ("\"\"\"\n\n\"\"\"", Line::Nothing),
            ("\"\"\"not closed", message("not closed")),
        ];
        for (text, expected) in cases {
            assert_eq!(Line::parse(text), expected, "{text:?}");
        }
    }

    #[test]
    fn a_block_is_open_until_its_end() {
        for open in ["\"\"\"", "  \"\"\"one\ntwo", "\"\"\"\"\""] {
            assert!(is_open(open), "{open:?}");
        }
        for whole in [
            "",
            "one",
            "say \"\"\"",
            "\"\"\"\"\"\"",
            "\"\"\"one\ntwo\"\"\"",
        ] {
            assert!(!is_open(whole), "{whole:?}");
        }
    }

    #[test]
    fn the_help_names_every_setting_and_fits_a_terminal() {
        for name in ["temperature", "seed", "max_tokens", "system", "verbose"] {
            assert!(HELP.contains(name), "{name}");
        }
        assert!(HELP.lines().all(|line| line.len() < 80));
    }
}
