//! Settings from a TOML file: each flag of a command is a key of the same name.
//!
//! There is no second list of settings: keys, types and defaults are those of the command line's
//! definition. What a file says becomes flags beside those that were typed, and those that were typed win.

use crate::args::{self, Cli, Command as Wanted};
use crate::failure::{Failure, Outcome};
use crate::{input, ui, version};
use clap::builder::ValueParser;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, ColorChoice, Command, FromArgMatches};
use std::any::TypeId;
use std::error::Error;
use std::ffi::OsString;
use std::path::Path;
use toml::de::{DeTable, DeValue};

/// What a file cannot say: where it is, and what only looks.
const NOT_IN_FILES: [&str; 7] = [
    "config",
    "print-config",
    "help",
    "version",
    "quiet",
    "verbose",
    "color",
];

/// Words without a flag that say what a setting says, by the setting's name.
const WORDS: [(&str, &str); 1] = [("model", "positional_models")];

/// What is not printed.
const SECRETS: [&str; 1] = ["api-key"];

/// The command that was typed, with what its file says. `None`: all was done already.
pub(crate) fn command_line(typed: Vec<OsString>) -> Outcome<Option<Cli>> {
    let command = built(color(&typed));
    let mut matches = command.clone().get_matches_from(&typed);
    let mut cli = read(&matches)?;
    ui::init(cli.output.verbosity(), cli.output.color);
    if let Wanted::Serve(args) = &cli.command
        && let Some(path) = &args.config
    {
        let text = input::read_json_text(path)?;
        let flags = flags(serve(&command)?, &text, path, of_serve(&matches))?;
        // After the command, before which there are only flags of all commands.
        let mut all = typed;
        let after = all
            .iter()
            .position(|word| word == "serve")
            .map_or(1, |at| at + 1);
        all.splice(after..after, flags);
        matches = command.clone().get_matches_from(all);
        cli = read(&matches)?;
    }
    match &cli.command {
        Wanted::Serve(args) if args.print_config => {
            ui::show(&print(serve(&command)?, of_serve(&matches)))?;
            Ok(None)
        }
        _ => Ok(Some(cli)),
    }
}

/// What `--color` says, before anything is parsed: messages about wrong flags have colours too.
fn color(typed: &[OsString]) -> ColorChoice {
    let words = typed.iter().filter_map(|word| word.to_str());
    let words: Vec<_> = words.take_while(|word| *word != "--").collect();
    let joined = words.iter().find_map(|word| word.strip_prefix("--color="));
    let apart = words.iter().position(|word| *word == "--color");
    let value = joined.or_else(|| words.get(apart? + 1).copied());
    value.and_then(|text| text.parse().ok()).unwrap_or_default()
}

/// The command line, whose commands have the flags of all commands as well.
fn built(color: ColorChoice) -> Command {
    let mut command = args::command().long_version(version::long()).color(color);
    command.build();
    command
}

fn read(matches: &ArgMatches) -> Outcome<Cli> {
    Cli::from_arg_matches(matches).map_err(|e| Failure::new(e.to_string()))
}

fn serve(command: &Command) -> Outcome<&Command> {
    let found = command.find_subcommand("serve");
    found.ok_or_else(|| Failure::new("there is no command serve"))
}

fn of_serve(matches: &ArgMatches) -> Option<&ArgMatches> {
    matches.subcommand_matches("serve")
}

/// The settings of a command, with their names.
fn settings(command: &Command) -> impl Iterator<Item = (&str, &Arg)> {
    let named = command.get_arguments();
    named
        .filter_map(|arg| arg.get_long().map(|name| (name, arg)))
        .filter(|(name, _)| !NOT_IN_FILES.contains(name))
}

/// The ids under which the command line has a setting: that of its flag, and of the words that say the same.
fn ids<'a>(name: &str, arg: &'a Arg) -> impl Iterator<Item = &'a str> {
    let words = WORDS.iter().filter(move |(setting, _)| *setting == name);
    let words: Vec<_> = words.map(|(_, id)| *id).collect();
    std::iter::once(arg.get_id().as_str()).chain(words)
}

/// What a setting is in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Switch,
    Whole,
    Number,
    Text,
}

impl Kind {
    fn of(arg: &Arg) -> Self {
        if !arg.get_action().takes_values() {
            return Kind::Switch;
        }
        let id = ValueParser::type_id(arg.get_value_parser());
        let whole = [
            TypeId::of::<u8>(),
            TypeId::of::<u16>(),
            TypeId::of::<u32>(),
            TypeId::of::<u64>(),
            TypeId::of::<usize>(),
            TypeId::of::<i64>(),
        ];
        match id {
            id if whole.iter().any(|other| id == *other) => Kind::Whole,
            id if id == TypeId::of::<f32>() || id == TypeId::of::<f64>() => Kind::Number,
            _ => Kind::Text,
        }
    }

    fn words(self) -> &'static str {
        match self {
            Kind::Switch => "true or false",
            Kind::Whole => "an integer",
            Kind::Number => "a number",
            Kind::Text => "a string",
        }
    }

    /// A value as one would type it.
    fn typed(self, value: &DeValue<'_>) -> Option<String> {
        match (self, value) {
            (Kind::Text, DeValue::String(text)) => Some(text.to_string()),
            (Kind::Whole | Kind::Number, DeValue::Integer(n)) => {
                let number = i64::from_str_radix(n.as_str(), n.radix()).ok()?;
                Some(number.to_string())
            }
            (Kind::Number, DeValue::Float(x)) => Some(x.as_str().to_owned()),
            _ => None,
        }
    }
}

/// A file's values as flags, but for settings that were typed.
fn flags(
    command: &Command,
    text: &str,
    path: &Path,
    typed: Option<&ArgMatches>,
) -> Outcome<Vec<OsString>> {
    let at = |offset: usize| {
        let before = text.get(..offset).unwrap_or(text);
        format!("{}:{}", path.display(), before.matches('\n').count() + 1)
    };
    let table = DeTable::parse(text).map_err(|e| {
        let place = e.span().map_or(0, |span| span.start);
        Failure::new(format!("{}: {}", at(place), e.message()))
    })?;
    let mut flags = Vec::new();
    for (key, value) in table.get_ref() {
        let place = at(key.span().start);
        let name: &str = key.get_ref();
        let Some((_, arg)) = settings(command).find(|(known, _)| *known == name) else {
            let hint = "hint: keys are the flags of `ferrum serve --help`, without their dashes";
            let message = format!("{place}: {name}: there is no such setting\n{hint}");
            return Err(Failure::new(message));
        };
        let found = of_value(arg, value.get_ref())
            .map_err(|reason| Failure::new(format!("{place}: {name}: {reason}")))?;
        for flag in &found {
            check(command, flag)
                .map_err(|reason| Failure::new(format!("{place}: {name}: {reason}")))?;
        }
        // A default that is written down asks for nothing, not even for what it belongs to.
        let default = arg.get_default_values().iter();
        let default = default.map(|value| format!("--{name}={}", value.to_string_lossy()));
        let is_default = found.iter().cloned().eq(default.map(OsString::from));
        let was_typed = |id| {
            let source = typed.and_then(|matches| matches.value_source(id));
            source == Some(ValueSource::CommandLine)
        };
        if !is_default && !ids(name, arg).any(was_typed) {
            flags.extend(found);
        }
    }
    Ok(flags)
}

/// The flags that say what a value of a file says.
fn of_value(arg: &Arg, value: &DeValue<'_>) -> Result<Vec<OsString>, String> {
    let (kind, name) = (Kind::of(arg), arg.get_long().unwrap_or_default());
    let one = |value: &DeValue<'_>| {
        let typed = kind
            .typed(value)
            .map(|text| format!("--{name}={text}").into());
        typed.ok_or_else(|| wrong(value, kind.words()))
    };
    match (kind, value, arg.get_action()) {
        (Kind::Switch, DeValue::Boolean(true), _) => Ok(vec![format!("--{name}").into()]),
        (Kind::Switch, DeValue::Boolean(false), _) => Ok(Vec::new()),
        (_, DeValue::Array(values), ArgAction::Append) => {
            values.iter().map(|value| one(value.get_ref())).collect()
        }
        (_, value, ArgAction::Append) if kind.typed(value).is_none() => {
            Err(wrong(value, &format!("{} or a list of them", kind.words())))
        }
        (_, value, _) => Ok(vec![one(value)?]),
    }
}

fn wrong(value: &DeValue<'_>, expected: &str) -> String {
    let kind = value.type_str();
    let article = if kind.starts_with(['a', 'i']) {
        "an"
    } else {
        "a"
    };
    format!("found {article} {kind}, expected {expected}")
}

/// Whether the command line takes a flag's value: ranges and names.
fn check(command: &Command, flag: &OsString) -> Result<(), String> {
    let mut alone = command.clone();
    match alone.try_get_matches_from_mut([&OsString::from("serve"), flag]) {
        Err(e)
            if matches!(
                e.kind(),
                ErrorKind::ValueValidation | ErrorKind::InvalidValue
            ) =>
        {
            let text = e.to_string();
            let first = text.lines().next().unwrap_or_default();
            let reason = e.source().map(ToString::to_string);
            Err(reason.unwrap_or_else(|| first.trim_start_matches("error: ").to_owned()))
        }
        // Whether settings go together is seen when all are there.
        _ => Ok(()),
    }
}

/// A text as TOML has it: as JSON does, but for one control character.
fn quote(text: &str) -> String {
    serde_json::Value::from(text)
        .to_string()
        .replace('\u{7f}', "\\u007F")
}

/// The settings that hold, as a file. Those that are not set stand as comments, and so do secrets.
fn print(command: &Command, matches: Option<&ArgMatches>) -> String {
    let mut text = String::new();
    for (name, arg) in settings(command) {
        let values = ids(name, arg)
            .filter_map(|id| matches?.get_raw(id))
            .flatten();
        let values: Vec<_> = values.map(|value| value.to_string_lossy()).collect();
        let kind = Kind::of(arg);
        let value = |text: &str| match kind {
            Kind::Text => quote(text),
            _ => text.to_owned(),
        };
        let line = match (values.as_slice(), arg.get_action()) {
            ([], _) => format!("# {name} ="),
            _ if SECRETS.contains(&name) => format!("# {name} is set, and not shown"),
            (values, ArgAction::Append) => {
                let values: Vec<_> = values.iter().map(|text| value(text)).collect();
                format!("{name} = [{}]", values.join(", "))
            }
            ([one, ..], _) => format!("{name} = {}", value(one)),
        };
        text.push_str(&line);
        text.push('\n');
    }
    text
}

/// What `ferrum serve --config FILE --print-config` prints where `text` is the file: for the fuzz target `toml`.
#[cfg(feature = "fuzzing")]
pub(crate) fn reprinted(text: &str) -> Outcome<String> {
    static BUILT: std::sync::LazyLock<Command> =
        std::sync::LazyLock::new(|| built(ColorChoice::Never));
    let serve = serve(&BUILT)?;
    let flags = flags(serve, text, Path::new("fuzz.toml"), None)?;
    let words = ["ferrum".into(), "serve".into()].into_iter().chain(flags);
    let matches = BUILT.clone().try_get_matches_from(words);
    let matches = matches.map_err(|e| Failure::new(e.to_string()))?;
    read(&matches)?;
    Ok(print(serve, of_serve(&matches)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::ServeArgs;

    /// Texts of which each setting takes one: names of things, and numbers that are in all ranges.
    const SAMPLES: [&str; 17] = [
        "1024",
        "4",
        "0.5",
        "cpu",
        "scalar",
        "f16",
        "127.0.0.1",
        "http://localhost:4318",
        "true",
        "hermes",
        "name=folder",
        "all",
        "cpu:0-13",
        "some text",
        "info",
        "json",
        "bf16",
    ];

    fn serve_args(flags: &[OsString]) -> Result<ServeArgs, clap::Error> {
        let words = ["ferrum".into(), "serve".into()].into_iter();
        let matches =
            built(ColorChoice::Never).try_get_matches_from(words.chain(flags.iter().cloned()))?;
        match Cli::from_arg_matches(&matches)?.command {
            Wanted::Serve(args) => Ok(*args),
            other => panic!("{other:?}"),
        }
    }

    fn file_args(text: &str, typed: &[&str]) -> Outcome<ServeArgs> {
        let command = built(ColorChoice::Never);
        let words = ["ferrum", "serve"].iter().chain(typed);
        let matches = command.clone().get_matches_from(words);
        let mut all = flags(
            serve(&command)?,
            text,
            Path::new("f.toml"),
            of_serve(&matches),
        )?;
        all.extend(typed.iter().map(|word| OsString::from(*word)));
        serve_args(&all).map_err(|e| Failure::new(e.to_string()))
    }

    /// Every setting but some with a value that it takes, as flags and as a file.
    fn everything(command: &Command, left_out: &[&str]) -> (Vec<OsString>, String) {
        let (mut typed, mut file) = (Vec::new(), String::new());
        for (name, arg) in settings(command) {
            if left_out.contains(&name) {
                continue;
            }
            let kind = Kind::of(arg);
            let takes = |sample: &&&str| match kind {
                Kind::Switch => **sample == "true",
                _ => check(command, &format!("--{name}={sample}").into()).is_ok(),
            };
            let sample = SAMPLES.iter().find(takes).expect(name);
            typed.push(match kind {
                Kind::Switch => format!("--{name}").into(),
                _ => format!("--{name}={sample}").into(),
            });
            let quoted = match kind {
                Kind::Text => format!("\"{sample}\""),
                _ => (*sample).to_owned(),
            };
            file.push_str(&match arg.get_action() {
                ArgAction::Append => format!("{name} = [{quoted}]\n"),
                _ => format!("{name} = {quoted}\n"),
            });
        }
        (typed, file)
    }

    /// Each of three sets of flags that exclude each other.
    #[test]
    fn every_flag_has_its_key_and_back() {
        for left_out in [
            &["layers", "gpu-layers", "draft-mtp"][..],
            &["layers", "tensor-parallel", "draft-mtp"],
            &[
                "backend",
                "device",
                "gpu-layers",
                "draft-model",
                "tensor-parallel",
            ],
        ] {
            has_its_key_and_back(left_out);
        }
    }

    fn has_its_key_and_back(left_out: &[&str]) {
        let command = built(ColorChoice::Never);
        let command = serve(&command).unwrap_or_else(|e| panic!("{e}"));
        let (typed, file) = everything(command, left_out);
        assert!(typed.len() > 15, "{typed:?}");
        let args = serve_args(&typed).unwrap_or_else(|e| panic!("{e}"));
        let of_file = file_args(&file, &[]).unwrap_or_else(|e| panic!("{e}\n{file}"));
        assert_eq!(format!("{of_file:?}"), format!("{args:?}"));
        // What is printed says the same, but for secrets.
        let words = ["ferrum".into(), "serve".into()].into_iter().chain(typed);
        let matches = built(ColorChoice::Never).get_matches_from(words);
        let printed = print(command, of_serve(&matches));
        for secret in SECRETS {
            assert!(printed.contains(&format!("# {secret} is set")), "{printed}");
        }
        let again = file_args(&printed, &["--api-key=1024"]);
        let again = again.unwrap_or_else(|e| panic!("{e}\n{printed}"));
        assert_eq!(format!("{again:?}"), format!("{args:?}"));
    }

    #[test]
    fn the_settings_that_hold_by_default_are_a_file() {
        let command = built(ColorChoice::Never);
        let command = serve(&command).unwrap_or_else(|e| panic!("{e}"));
        let matches = built(ColorChoice::Never).get_matches_from(["ferrum", "serve"]);
        let printed = print(command, of_serve(&matches));
        let args = file_args(&printed, &[]).unwrap_or_else(|e| panic!("{e}\n{printed}"));
        let expected = serve_args(&[]).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(format!("{args:?}"), format!("{expected:?}"));
    }

    #[test]
    fn what_is_typed_wins() {
        let text = "port = 1\nhost = \"0.0.0.0\"\napi-key = [\"a\", \"b\"]\n";
        let args = file_args(text, &["--port", "2", "--api-key", "c"]);
        let args = args.unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(
            (args.port, args.host.to_string()),
            (2, "0.0.0.0".to_owned())
        );
        assert_eq!(args.api_key, ["c"]);
        // One model or several, with names or without.
        for (text, expected) in [
            ("model = \"m.gguf\"", &[(None, "m.gguf")][..]),
            (
                "model = [\"a=b\", \"c/d\"]",
                &[(Some("a"), "b"), (None, "c/d")],
            ),
        ] {
            let args = file_args(text, &[]).unwrap_or_else(|e| panic!("{e}"));
            let found = args
                .models()
                .iter()
                .map(|m| (m.name.as_deref(), m.source.to_str()));
            let expected = expected.iter().map(|&(name, source)| (name, Some(source)));
            assert!(found.eq(expected), "{text}");
        }
        let args = file_args("model = \"m.gguf\"", &["other.gguf"]);
        let args = args.unwrap_or_else(|e| panic!("{e}"));
        let sources: Vec<_> = args.models().iter().map(|m| m.source.to_str()).collect();
        assert_eq!(sources, [Some("other.gguf")]);
        let args = file_args("api-key = \"one\"", &[]).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!((args.port, args.api_key), (8000, vec!["one".to_owned()]));
    }

    #[test]
    fn models_are_printed_however_they_were_given() {
        let command = built(ColorChoice::Never);
        let serve = serve(&command).unwrap_or_else(|e| panic!("{e}"));
        for words in [
            &["a.gguf", "b=c/d"][..],
            &["--model", "a.gguf", "-m", "b=c/d"],
        ] {
            let words = ["ferrum", "serve"].iter().chain(words);
            let matches = command.clone().get_matches_from(words);
            let printed = print(serve, of_serve(&matches));
            assert!(
                printed.contains("model = [\"a.gguf\", \"b=c/d\"]\n"),
                "{printed}"
            );
        }
    }

    #[test]
    fn a_color_is_known_before_anything_is_parsed() {
        for (typed, expected) in [
            ("ferrum run", ColorChoice::Auto),
            ("ferrum --color never run", ColorChoice::Never),
            ("ferrum run --color=always", ColorChoice::Always),
            ("ferrum run --color sometimes", ColorChoice::Auto),
            ("ferrum run --color", ColorChoice::Auto),
            ("ferrum run -- --color=always", ColorChoice::Auto),
        ] {
            let typed: Vec<_> = typed.split(' ').map(OsString::from).collect();
            assert_eq!(color(&typed), expected, "{typed:?}");
        }
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        let cases = [
            (
                "port = 1\nprot = 2",
                "f.toml:2: prot: there is no such setting",
            ),
            ("print-config = true", "f.toml:1: print-config: there is no"),
            (
                "[server]\nport = 1",
                "f.toml:1: server: there is no such setting",
            ),
            (
                "\nport = \"8000\"",
                "f.toml:2: port: found a string, expected an integer",
            ),
            (
                "port = 1.5",
                "f.toml:1: port: found a float, expected an integer",
            ),
            (
                "port = [1]",
                "f.toml:1: port: found an array, expected an integer",
            ),
            (
                "port = 70000",
                "f.toml:1: port: found \"70000\", expected a whole number from 0 to 65535",
            ),
            (
                "max-seqs = 0",
                "f.toml:1: max-seqs: found \"0\", expected a whole number from 1 to 1024",
            ),
            (
                "host = 1",
                "f.toml:1: host: found an integer, expected a string",
            ),
            ("host = \"here\"", "f.toml:1: host: invalid IP address"),
            ("backend = \"abacus\"", "f.toml:1: backend: "),
            (
                "api-key = [1]",
                "f.toml:1: api-key: found an integer, expected a string",
            ),
            ("api-key = true", "expected a string or a list of them"),
            (
                "host = { a = 1 }",
                "f.toml:1: host: found a table, expected a string",
            ),
            ("port = 1\nport = 2", "f.toml:2: duplicate key"),
            ("\n\nport 1", "f.toml:3: "),
        ];
        for (text, expected) in cases {
            match file_args(text, &[]) {
                Ok(args) => panic!("{text}: {args:?}"),
                Err(e) => assert!(e.to_string().contains(expected), "{text}: {e}"),
            }
        }
    }
}
