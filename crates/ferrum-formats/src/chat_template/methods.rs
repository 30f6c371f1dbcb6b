//! Methods of texts, lists and dictionaries.

use super::call::{Given, int_or, need_str, truth};
use super::format;
use super::lexer::is_space;
use super::meter::{Meter, Res, fail};
use super::value::{SeqKind, Value, undefined};
use std::sync::Arc;

const STR: [&str; 40] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
];
const STR_MORE: [&str; 4] = ["swapcase", "title", "upper", "zfill"];
const DICT: [&str; 5] = ["copy", "get", "items", "keys", "values"];
const DICT_CHANGES: [&str; 5] = ["clear", "pop", "popitem", "setdefault", "update"];
const LIST: [&str; 3] = ["copy", "count", "index"];
const LIST_CHANGES: [&str; 8] = [
    "append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort",
];
const TUPLE: [&str; 2] = ["count", "index"];

/// What a value's type has under a name.
pub(super) enum Found {
    /// A method.
    Method(&'static str),
    /// Something that would change the value: it can be named, but not used.
    Unsafe,
}

/// Looks a method up.
pub(super) fn find(value: &Value, name: &str) -> Option<Found> {
    let among = |names: &[&'static str]| names.iter().find(|known| **known == name).copied();
    let found = match value {
        Value::Str(_) => among(&STR).or_else(|| among(&STR_MORE)),
        Value::Dict(_) => {
            if among(&DICT_CHANGES).is_some() {
                return Some(Found::Unsafe);
            }
            among(&DICT)
        }
        Value::Seq(seq) => match seq.kind {
            SeqKind::List => {
                if among(&LIST_CHANGES).is_some() {
                    return Some(Found::Unsafe);
                }
                among(&LIST)
            }
            SeqKind::Tuple | SeqKind::Range | SeqKind::Group => among(&TUPLE),
            _ => None,
        },
        Value::Float(_) => among(&["is_integer"]),
        _ => None,
    };
    found.map(Found::Method)
}

/// Calls a method.
pub(super) fn call(value: &Value, name: &'static str, given: Given, meter: &Meter) -> Res<Value> {
    match value {
        Value::Str(text) => {
            meter.step(1 + text.len() / 32)?;
            str_method(text, name, given, meter)
        }
        Value::Dict(dict) => {
            let entries = || dict.entries.iter().cloned();
            match name {
                "get" => {
                    let [key, default] = given.bind(name, ["key", "default"])?;
                    let found = key.as_ref().and_then(|key| dict.get(key).cloned());
                    Ok(found.or(default).unwrap_or(Value::None))
                }
                "keys" => {
                    given.none(name)?;
                    Value::seq(
                        meter,
                        SeqKind::Keys,
                        entries().map(|(key, _)| key).collect(),
                    )
                }
                "values" => {
                    given.none(name)?;
                    Value::seq(
                        meter,
                        SeqKind::Values,
                        entries().map(|(_, value)| value).collect(),
                    )
                }
                "items" => {
                    given.none(name)?;
                    let pairs = entries().map(|(key, value)| Value::tuple(meter, vec![key, value]));
                    Value::seq(meter, SeqKind::Items, pairs.collect::<Res<_>>()?)
                }
                _ => Ok(value.clone()),
            }
        }
        Value::Seq(seq) => match name {
            "count" => {
                let [item] = given.bind(name, ["value"])?;
                let mut count = 0;
                for held in &seq.items {
                    if let Some(item) = &item {
                        count += i128::from(held.equals(item, meter)?);
                    }
                }
                Ok(Value::Int(count))
            }
            "index" => {
                let [item] = given.bind(name, ["value"])?;
                for (at, held) in seq.items.iter().enumerate() {
                    if let Some(item) = &item
                        && held.equals(item, meter)?
                    {
                        return Ok(Value::Int(at as i128));
                    }
                }
                fail("value is not in list")
            }
            _ => Ok(value.clone()),
        },
        Value::Float(number) => Ok(Value::Bool(number.fract() == 0.0)),
        Value::Undefined(message) => undefined(message),
        other => fail(format!(
            "'{}' object has no attribute '{name}'",
            other.type_name()
        )),
    }
}

fn list_of<'a>(meter: &Meter, parts: impl Iterator<Item = &'a str>) -> Res<Value> {
    let mut items = Vec::new();
    for part in parts {
        items.push(Value::text(meter, part)?);
    }
    Value::list(meter, items)
}

/// A range of characters as bytes, for `find` and its kin.
fn char_range(
    text: &str,
    start: Option<&Value>,
    end: Option<&Value>,
) -> Res<Option<(usize, usize)>> {
    if start.is_none() && end.is_none() {
        return Ok(Some((0, text.len())));
    }
    let len = text.chars().count() as i128;
    let place = |at: i128| if at < 0 { (at + len).max(0) } else { at };
    let (start, end) = (place(int_or(start, 0)?), place(int_or(end, len)?).min(len));
    if start > len || start > end {
        return Ok(None);
    }
    let byte = |at: i128| {
        text.char_indices()
            .nth(at as usize)
            .map_or(text.len(), |(byte, _)| byte)
    };
    Ok(Some((byte(start), byte(end))))
}

fn str_method(text: &Arc<str>, name: &'static str, given: Given, meter: &Meter) -> Res<Value> {
    let out = |text: String| Value::text(meter, text);
    match name {
        "upper" | "lower" | "title" | "capitalize" | "swapcase" | "casefold" => {
            given.none(name)?;
            meter.bytes(text.len() * 3)?;
            out(match name {
                "upper" => text.to_uppercase(),
                "lower" | "casefold" => text.to_lowercase(),
                "title" => title(text),
                "capitalize" => capitalize(text),
                _ => text.chars().map(swap_case).collect(),
            })
        }
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = given.bind(name, ["chars"])?;
            out(strip(text, chars.as_ref(), name != "rstrip", name != "lstrip")?.to_owned())
        }
        "split" | "rsplit" => {
            let [sep, max] = given.bind(name, ["sep", "maxsplit"])?;
            split(
                text,
                sep.as_ref(),
                int_or(max.as_ref(), -1)?,
                name == "rsplit",
                meter,
            )
        }
        "splitlines" => {
            let [keep] = given.bind(name, ["keepends"])?;
            list_of(meter, lines(text, truth(keep.as_ref())).into_iter())
        }
        "replace" => {
            let [old, new, count] = given.bind(name, ["old", "new", "count"])?;
            let (old, new) = (need_str(old.as_ref(), name)?, need_str(new.as_ref(), name)?);
            replace(text, &old, &new, int_or(count.as_ref(), -1)?, meter)
        }
        "startswith" | "endswith" => affix(text, name, given),
        "find" | "rfind" | "index" | "rindex" | "count" => search(text, name, given),
        "join" => {
            let [items] = given.bind(name, ["iterable"])?;
            join(text, items.as_ref(), meter)
        }
        "format" => format::format(text, &given, meter),
        "format_map" => {
            let [mapping] = given.bind(name, ["mapping"])?;
            let mut given = Given::default();
            if let Some(Value::Dict(dict)) = &mapping {
                let named = dict.entries.iter();
                given.named = named
                    .filter_map(|(key, value)| Some((key.as_str()?.into(), value.clone())))
                    .collect();
            }
            format::format(text, &given, meter)
        }
        "removeprefix" | "removesuffix" => {
            let [affix] = given.bind(name, ["affix"])?;
            let affix = need_str(affix.as_ref(), name)?;
            let cut = match name {
                "removeprefix" => text.strip_prefix(&*affix),
                _ => text.strip_suffix(&*affix),
            };
            out(cut.unwrap_or(text).to_owned())
        }
        "partition" | "rpartition" => {
            let [sep] = given.bind(name, ["sep"])?;
            let sep = need_str(sep.as_ref(), name)?;
            if sep.is_empty() {
                return fail("empty separator");
            }
            let parts = match name {
                "partition" => text.split_once(&*sep).map(|(a, b)| [a, &sep, b]),
                _ => text.rsplit_once(&*sep).map(|(a, b)| [a, &sep, b]),
            };
            let whole = if name == "partition" {
                [&**text, "", ""]
            } else {
                ["", "", &**text]
            };
            let parts = parts.unwrap_or(whole).map(|part| Value::text(meter, part));
            Value::tuple(meter, parts.into_iter().collect::<Res<_>>()?)
        }
        "center" | "ljust" | "rjust" | "zfill" => justify(text, name, given, meter),
        "expandtabs" => {
            let [size] = given.bind(name, ["tabsize"])?;
            let size = int_or(size.as_ref(), 8)?.clamp(0, 100) as usize;
            meter.bytes(text.len() * size.max(1))?;
            out(expand_tabs(text, size))
        }
        _ => {
            given.none(name)?;
            Ok(Value::Bool(question(text, name)))
        }
    }
}

/// The methods that ask something of a text.
fn question(text: &str, name: &str) -> bool {
    let all = |held: fn(char) -> bool| !text.is_empty() && text.chars().all(held);
    match name {
        "isalnum" => all(|c| c.is_alphanumeric()),
        "isalpha" => all(|c| c.is_alphabetic()),
        "isascii" => text.is_ascii(),
        "isdecimal" => {
            all(|c| c.is_ascii_digit() || (!c.is_ascii() && c.is_numeric() && is_decimal(c)))
        }
        "isdigit" => {
            all(|c| c.is_ascii_digit() || is_decimal(c) || "²³¹⁰⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉".contains(c))
        }
        "isnumeric" => all(|c| c.is_numeric()),
        "isspace" => all(is_space),
        "isprintable" => text.chars().all(|c| !c.is_control()),
        "isidentifier" => {
            let mut chars = text.chars();
            chars.next().is_some_and(|c| c == '_' || c.is_alphabetic())
                && chars.all(|c| c == '_' || c.is_alphanumeric())
        }
        "islower" => {
            text.chars().any(|c| c.is_lowercase()) && !text.chars().any(|c| c.is_uppercase())
        }
        "isupper" => {
            text.chars().any(|c| c.is_uppercase()) && !text.chars().any(|c| c.is_lowercase())
        }
        _ => text.chars().any(|c| c.is_alphabetic()) && title(text) == *text,
    }
}

/// Digits of the scripts that write numbers in base ten, in blocks of ten.
fn is_decimal(c: char) -> bool {
    const ZEROS: [u32; 22] = [
        0x660, 0x6F0, 0x7C0, 0x966, 0x9E6, 0xA66, 0xAE6, 0xB66, 0xBE6, 0xC66, 0xCE6, 0xD66, 0xDE6,
        0xE50, 0xED0, 0xF20, 0x1040, 0x1090, 0x17E0, 0x1810, 0xA620, 0xFF10,
    ];
    ZEROS
        .iter()
        .any(|&zero| (zero..zero + 10).contains(&u32::from(c)))
}

pub(super) fn capitalize(text: &str) -> String {
    let mut chars = text.chars();
    match chars.next() {
        Some(first) => first
            .to_uppercase()
            .chain(chars.as_str().to_lowercase().chars())
            .collect(),
        None => String::new(),
    }
}

fn swap_case(c: char) -> String {
    if c.is_uppercase() {
        c.to_lowercase().collect()
    } else {
        c.to_uppercase().collect()
    }
}

/// `str.title`: a letter is upper case unless a letter is before it.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_word = false;
    for c in text.chars() {
        match in_word {
            true => out.extend(c.to_lowercase()),
            false => out.extend(c.to_uppercase()),
        }
        in_word = c.is_alphabetic();
    }
    out
}

pub(super) fn strip<'t>(
    text: &'t str,
    chars: Option<&Value>,
    left: bool,
    right: bool,
) -> Res<&'t str> {
    let set = match chars {
        None | Some(Value::None) => None,
        Some(Value::Str(set)) => Some(set.clone()),
        Some(_) => return fail("strip arg must be None or str"),
    };
    let held = |c: char| match &set {
        Some(set) => set.contains(c),
        None => is_space(c),
    };
    let text = if left {
        text.trim_start_matches(held)
    } else {
        text
    };
    Ok(if right {
        text.trim_end_matches(held)
    } else {
        text
    })
}

fn split(
    text: &str,
    sep: Option<&Value>,
    max: i128,
    from_right: bool,
    meter: &Meter,
) -> Res<Value> {
    let max = usize::try_from(max).unwrap_or(usize::MAX - 1);
    let sep = match sep {
        None | Some(Value::None) => None,
        Some(Value::Str(sep)) if sep.is_empty() => return fail("empty separator"),
        Some(Value::Str(sep)) => Some(sep.clone()),
        Some(other) => {
            return fail(format!("must be str or None, not {}", other.type_name()));
        }
    };
    match (sep, from_right) {
        (Some(sep), false) => list_of(meter, text.splitn(max + 1, &*sep)),
        (Some(sep), true) => {
            let mut parts: Vec<&str> = text.rsplitn(max + 1, &*sep).collect();
            parts.reverse();
            list_of(meter, parts.into_iter())
        }
        (None, from_right) => {
            let mut parts = Vec::new();
            let mut rest = if from_right {
                text.trim_end_matches(is_space)
            } else {
                text.trim_start_matches(is_space)
            };
            while !rest.is_empty() {
                if parts.len() == max {
                    parts.push(rest);
                    break;
                }
                let (part, more) = if from_right {
                    match rest.char_indices().rfind(|&(_, c)| is_space(c)) {
                        Some((at, c)) => (
                            &rest[at + c.len_utf8()..],
                            rest[..at].trim_end_matches(is_space),
                        ),
                        None => (rest, ""),
                    }
                } else {
                    match rest.find(is_space) {
                        Some(at) => (&rest[..at], rest[at..].trim_start_matches(is_space)),
                        None => (rest, ""),
                    }
                };
                parts.push(part);
                rest = more;
            }
            if from_right {
                parts.reverse();
            }
            list_of(meter, parts.into_iter())
        }
    }
}

/// Lines as Python splits them.
pub(super) fn lines(text: &str, keep: bool) -> Vec<&str> {
    let ends = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(ends) {
        let width = rest[at..].chars().next().map_or(1, char::len_utf8);
        let width = if rest[at..].starts_with("\r\n") {
            2
        } else {
            width
        };
        lines.push(&rest[..if keep { at + width } else { at }]);
        rest = &rest[at + width..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

pub(super) fn replace(text: &str, old: &str, new: &str, count: i128, meter: &Meter) -> Res<Value> {
    let found = if old.is_empty() {
        text.chars().count() + 1
    } else {
        text.matches(old).count()
    };
    let count = usize::try_from(count).unwrap_or(usize::MAX).min(found);
    meter.bytes(text.len().saturating_add(count.saturating_mul(new.len())))?;
    Ok(Value::str(text.replacen(old, new, count)))
}

fn affix(text: &str, name: &str, given: Given) -> Res<Value> {
    let [affix, start, end] = given.bind(name, ["prefix", "start", "end"])?;
    let Some((from, to)) = char_range(text, start.as_ref(), end.as_ref())? else {
        return Ok(Value::Bool(false));
    };
    let part = &text[from..to];
    let holds = |affix: &str| match name {
        "startswith" => part.starts_with(affix),
        _ => part.ends_with(affix),
    };
    match &affix {
        Some(Value::Str(affix)) => Ok(Value::Bool(holds(affix))),
        Some(Value::Seq(seq)) if seq.kind == SeqKind::Tuple => Ok(Value::Bool(
            seq.items.iter().filter_map(Value::as_str).any(holds),
        )),
        other => fail(format!(
            "{name} first arg must be str or a tuple of str, not {}",
            other.as_ref().map_or("nothing", Value::type_name)
        )),
    }
}

fn search(text: &str, name: &str, given: Given) -> Res<Value> {
    let [part, start, end] = given.bind(name, ["sub", "start", "end"])?;
    let part = need_str(part.as_ref(), name)?;
    let range = char_range(text, start.as_ref(), end.as_ref())?;
    let within = range.map(|(from, to)| (from, &text[from..to]));
    if name == "count" {
        let count = within.map_or(0, |(_, inside)| match part.is_empty() {
            true => inside.chars().count() + 1,
            false => inside.matches(&*part).count(),
        });
        return Ok(Value::Int(count as i128));
    }
    let found = within.and_then(|(from, inside)| {
        let at = match name.starts_with('r') {
            true => inside.rfind(&*part),
            false => inside.find(&*part),
        };
        Some(text[..from + at?].chars().count() as i128)
    });
    match found {
        Some(at) => Ok(Value::Int(at)),
        None if name.ends_with("index") => fail("substring not found"),
        None => Ok(Value::Int(-1)),
    }
}

fn join(separator: &str, items: Option<&Value>, meter: &Meter) -> Res<Value> {
    let Some(items) = items else {
        return fail("join() takes exactly one argument");
    };
    let mut out = String::new();
    for (at, item) in items.items(meter)?.iter().enumerate() {
        let Value::Str(text) = item else {
            return fail(format!(
                "sequence item {at}: expected str instance, {} found",
                item.type_name()
            ));
        };
        let between = if at > 0 { separator } else { "" };
        meter.bytes(between.len() + text.len())?;
        out.push_str(between);
        out.push_str(text);
    }
    Ok(Value::str(out))
}

fn justify(text: &str, name: &str, given: Given, meter: &Meter) -> Res<Value> {
    let [width, fill] = given.bind(name, ["width", "fillchar"])?;
    let width = usize::try_from(int_or(width.as_ref(), 0)?.max(0)).unwrap_or(usize::MAX);
    let fill = match &fill {
        None => ' ',
        Some(Value::Str(fill)) if fill.chars().count() == 1 => fill.chars().next().unwrap_or(' '),
        Some(_) => return fail("The fill character must be exactly one character long"),
    };
    let missing = width.saturating_sub(text.chars().count());
    meter.bytes(missing.saturating_mul(4).saturating_add(text.len()))?;
    let filler = |count: usize| -> String { std::iter::repeat_n(fill, count).collect() };
    Ok(Value::str(match name {
        "ljust" => format!("{text}{}", filler(missing)),
        "rjust" => format!("{}{text}", filler(missing)),
        "zfill" => {
            let zeros = "0".repeat(missing);
            match text.strip_prefix(['+', '-']) {
                Some(digits) => format!("{}{zeros}{digits}", &text[..1]),
                None => format!("{zeros}{text}"),
            }
        }
        _ => {
            // Python puts the odd one to the left when the width is odd.
            let left = missing / 2 + (missing & width & 1);
            format!("{}{text}{}", filler(left), filler(missing - left))
        }
    }))
}

fn expand_tabs(text: &str, size: usize) -> String {
    let mut out = String::new();
    let mut column = 0;
    for c in text.chars() {
        match c {
            '\t' => {
                let spaces = if size == 0 { 0 } else { size - column % size };
                out.extend(std::iter::repeat_n(' ', spaces));
                column += spaces;
            }
            c => {
                column = if matches!(c, '\n' | '\r') {
                    0
                } else {
                    column + 1
                };
                out.push(c);
            }
        }
    }
    out
}
