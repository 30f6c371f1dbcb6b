//! Methods of texts, lists and dictionaries, as Python has them.

use super::args::{bind, int_or, need_str, truth};
use super::budget::{charge, fail};
use super::semantics::{compare, formatted, items_of};
use super::value::{Dict, List, Size, into_bounded, type_name};
use minijinja::formatting::FormatStyle;
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

const LIST: [&str; 3] = ["copy", "count", "index"];
const DICT: [&str; 5] = ["copy", "get", "items", "keys", "values"];

/// Whether Python's type of a value has a method.
pub(super) fn exists(value: &Value, name: &str) -> bool {
    let names: &[&str] = match type_name(value) {
        "list" | "tuple" => &LIST,
        "dict" => &DICT,
        _ => &[],
    };
    names.contains(&name)
}

fn unknown<T>(kind: &str, name: &str) -> Result<T, Error> {
    if matches!(
        name,
        "append"
            | "clear"
            | "extend"
            | "insert"
            | "pop"
            | "popitem"
            | "remove"
            | "reverse"
            | "setdefault"
            | "sort"
            | "update"
    ) {
        return fail(format!(
            "'{name}' would change a {kind}, which a template cannot"
        ));
    }
    fail(format!("'{kind}' object has no method '{name}'"))
}

pub(super) fn of_list(
    state: &mut State,
    list: &List,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match name {
        "count" | "index" => {
            let [item] = bind(state, args, ["value"])?;
            let item = item.unwrap_or_default();
            let mut count = 0;
            for (at, held) in list.items.iter().enumerate() {
                if compare(state, "==", held, &item)? {
                    if name == "index" {
                        return Ok(at.into());
                    }
                    count += 1;
                }
            }
            if name == "index" {
                fail("the list has no such item")
            } else {
                Ok(count.into())
            }
        }
        "copy" => List::charged(state, list.items.clone(), list.tuple),
        _ => unknown("list", name),
    }
}

pub(super) fn of_dict(
    state: &mut State,
    dict: &Dict,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let pairs = |state: &State| {
        let pairs = dict
            .items
            .iter()
            .map(|(key, value)| List::charged(state, vec![key.clone(), value.clone()], true));
        pairs.collect::<Result<Vec<_>, _>>()
    };
    match name {
        "get" => {
            let [key, default] = bind(state, args, ["key", "default"])?;
            let key = key.filter(|key| key.as_object().is_none());
            let found = key.and_then(|key| dict.items.get(&key).cloned());
            Ok(found.or(default).unwrap_or(().into()))
        }
        "keys" => List::charged(state, dict.items.keys().cloned().collect(), false),
        "values" => List::charged(state, dict.items.values().cloned().collect(), false),
        "items" => {
            let pairs = pairs(state)?;
            List::charged(state, pairs, false)
        }
        "copy" => Dict::charged(state, dict.items.clone().into_iter().collect()),
        _ => match dict.items.get(&Value::from(name)).cloned() {
            Some(function) => function.call(state, args),
            None => unknown("dict", name),
        },
    }
}

pub(super) fn of_text(
    state: &mut State,
    text: &str,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    for arg in args {
        charge(state, Size::of(arg).bytes)?;
        // Each end of the text is looked for among the characters.
        if let Some(chars) = arg.as_str().filter(|_| name.ends_with("strip")) {
            charge(
                state,
                (text.len() as u64).saturating_mul(chars.len() as u64),
            )?;
        }
    }
    charge(state, text.len() as u64)?;
    let list = |parts: Vec<&str>| Value::from_iter(parts);
    let tuple =
        |state: &State, parts: [&str; 3]| List::charged(state, parts.map(Value::from).into(), true);
    match name {
        "split" | "rsplit" => {
            let [separator, most] = bind(state, args, ["sep", "maxsplit"])?;
            charge(state, 24 * text.len() as u64)?;
            let limit = int_or(most.as_ref(), -1)?;
            let Some(separator) = separator.filter(|separator| !separator.is_none()) else {
                if name == "rsplit" && limit >= 0 {
                    return fail("rsplit() with a limit needs a separator");
                }
                let args = [().into(), limit.into()];
                return unknown_method_callback(state, &text.into(), "split", &args);
            };
            let most = usize::try_from(limit).map_or(usize::MAX, |most| most.saturating_add(1));
            let separator = need_str(Some(&separator))?;
            if separator.is_empty() {
                return fail("empty separator");
            }
            Ok(list(match name {
                "split" => text.splitn(most, separator).collect(),
                _ => {
                    let mut parts: Vec<_> = text.rsplitn(most, separator).collect();
                    parts.reverse();
                    parts
                }
            }))
        }
        "splitlines" => {
            let [keep] = bind(state, args, ["keepends"])?;
            charge(state, 24 * text.len() as u64)?;
            let lines = text
                .split_inclusive('\n')
                .map(|line| match truth(keep.as_ref()) {
                    true => line,
                    false => line
                        .strip_suffix('\n')
                        .map_or(line, |line| line.strip_suffix('\r').unwrap_or(line)),
                });
            Ok(list(lines.collect()))
        }
        "partition" | "rpartition" => {
            let [separator] = bind(state, args, ["sep"])?;
            let separator = need_str(separator.as_ref())?;
            let (found, missing) = match name {
                "partition" => (text.split_once(separator), [text, "", ""]),
                _ => (text.rsplit_once(separator), ["", "", text]),
            };
            tuple(
                state,
                found.map_or(missing, |(before, after)| [before, separator, after]),
            )
        }
        "removeprefix" | "removesuffix" => {
            let [end] = bind(state, args, ["prefix"])?;
            let end = need_str(end.as_ref())?;
            let rest = if name == "removeprefix" {
                text.strip_prefix(end)
            } else {
                text.strip_suffix(end)
            };
            Ok(rest.unwrap_or(text).into())
        }
        "index" | "rindex" => {
            let at = unknown_method_callback(
                state,
                &text.into(),
                if name == "index" { "find" } else { "rfind" },
                args,
            )?;
            if at.as_i64() == Some(-1) {
                fail("substring not found")
            } else {
                Ok(at)
            }
        }
        "swapcase" => {
            let swap = |c: char| -> String {
                if c.is_uppercase() {
                    c.to_lowercase().collect()
                } else {
                    c.to_uppercase().collect()
                }
            };
            Ok(text.chars().map(swap).collect::<String>().into())
        }
        "casefold" => Ok(text.to_lowercase().into()),
        "isdecimal" => Ok((!text.is_empty() && text.chars().all(|c| c.is_ascii_digit())).into()),
        "ljust" | "rjust" | "center" | "zfill" => {
            let [width, fill] = bind(state, args, ["width", "fillchar"])?;
            let fill = fill.as_ref().map_or(Ok(" "), |fill| need_str(Some(fill)))?;
            let width = usize::try_from(int_or(width.as_ref(), 0)?).unwrap_or(0);
            padded(state, text, name, width, fill)
        }
        "format" => formatted(state, FormatStyle::StrFormat, text, args),
        "join" => {
            let [items] = bind(state, args, ["iterable"])?;
            let items = items_of(state, &items.unwrap_or_default())?;
            let mut out = String::new();
            for (at, item) in items.iter().enumerate() {
                let between = if at > 0 { text } else { "" };
                let item = need_str(Some(item))?;
                charge(state, (between.len() + item.len()) as u64)?;
                out.extend([between, item]);
            }
            Ok(out.into())
        }
        _ => {
            let result = unknown_method_callback(state, &text.into(), name, args);
            match result {
                Err(error) if error.kind() == ErrorKind::UnknownMethod => unknown("str", name),
                result => into_bounded(state, result?),
            }
        }
    }
}

/// A text in a field of a width.
pub(super) fn padded(
    state: &State,
    text: &str,
    name: &str,
    width: usize,
    fill: &str,
) -> Result<Value, Error> {
    if fill.chars().count() != 1 {
        return fail("the fill character must be exactly one character long");
    }
    let missing = width.saturating_sub(text.chars().count());
    charge(
        state,
        (missing as u64)
            .saturating_mul(4)
            .saturating_add(text.len() as u64),
    )?;
    // Python puts the odd one to the left when the width is odd.
    let left = match name {
        "ljust" => 0,
        "center" => missing / 2 + (missing & width & 1),
        _ => missing,
    };
    let (sign, text) = match (name, text.strip_prefix(['+', '-'])) {
        ("zfill", Some(digits)) => text.split_at(text.len() - digits.len()),
        _ => ("", text),
    };
    let fill = if name == "zfill" { "0" } else { fill };
    Ok(
        [sign, &fill.repeat(left), text, &fill.repeat(missing - left)]
            .concat()
            .into(),
    )
}
