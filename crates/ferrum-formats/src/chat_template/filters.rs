//! Filters on single values.

use super::call::{Given, int_or, need_str, truth};
use super::filters_seq;
use super::format;
use super::interp::Interp;
use super::lexer::is_space;
use super::meter::{Meter, Res, fail};
use super::methods;
use super::text::{JsonStyle, json, str_of};
use super::value::{Value, undefined};
use std::sync::Arc;

/// Every filter there is, for `is filter`.
pub(super) const NAMES: [&str; 49] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "pprint",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "striptags",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "wordcount",
];

/// Applies a filter.
pub(super) fn apply(interp: &Interp, name: &str, value: Value, given: Given) -> Res<Value> {
    let meter = &interp.meter;
    meter.step(1)?;
    if let Some(result) = filters_seq::apply(interp, name, &value, &given) {
        return result;
    }
    let text = |value: &Value| -> Res<Arc<str>> {
        let text = str_of(value, meter)?;
        meter.bytes(text.len())?;
        Ok(text)
    };
    match name {
        "abs" => abs(&value, given),
        "attr" => {
            let [name] = given.bind(name, ["name"])?;
            let name = need_str(name.as_ref(), "attr")?;
            if let Value::Undefined(message) = &value {
                return undefined(message);
            }
            Ok(interp.plain_attribute(&value, &name))
        }
        "capitalize" | "lower" | "upper" | "title" => {
            given.none(name)?;
            let text = text(&value)?;
            meter.bytes(text.len() * 3)?;
            Ok(Value::str(match name {
                "capitalize" => methods::capitalize(&text),
                "lower" => text.to_lowercase(),
                "upper" => text.to_uppercase(),
                _ => title(&text),
            }))
        }
        "center" => {
            let [width] = given.bind(name, ["width"])?;
            let width = Value::Int(int_or(width.as_ref(), 80)?);
            let given = Given {
                positional: vec![width],
                named: Vec::new(),
            };
            methods::call(&Value::Str(text(&value)?), "center", given, meter)
        }
        "count" | "length" => {
            given.none(name)?;
            Ok(Value::Int(value.length(meter)? as i128))
        }
        "d" | "default" => {
            let [default, boolean] = given.bind(name, ["default_value", "boolean"])?;
            let absent = value.is_undefined() || (truth(boolean.as_ref()) && !value.truth());
            Ok(if absent {
                default.unwrap_or_else(|| Value::str(""))
            } else {
                value
            })
        }
        "e" | "escape" | "forceescape" => {
            given.none(name)?;
            let text = text(&value)?;
            meter.bytes(text.len() * 5)?;
            let mut out = String::new();
            for c in text.chars() {
                match c {
                    '&' => out.push_str("&amp;"),
                    '<' => out.push_str("&lt;"),
                    '>' => out.push_str("&gt;"),
                    '\'' => out.push_str("&#39;"),
                    '"' => out.push_str("&#34;"),
                    c => out.push(c),
                }
            }
            Ok(Value::str(out))
        }
        "float" => {
            let [default] = given.bind(name, ["default"])?;
            if let Value::Undefined(message) = &value {
                return undefined(message);
            }
            let number = value.as_float().or_else(|| parse_float(value.as_str()?));
            Ok(number
                .map(Value::Float)
                .or(default)
                .unwrap_or(Value::Float(0.0)))
        }
        "int" => int(&value, given),
        "format" => {
            let pattern = text(&value)?;
            if !given.positional.is_empty() && !given.named.is_empty() {
                return fail("can't handle positional and keyword arguments at the same time");
            }
            let values = if given.named.is_empty() {
                Value::tuple(meter, given.positional)?
            } else {
                let named = given
                    .named
                    .into_iter()
                    .map(|(name, value)| (Value::Str(name), value));
                Value::dict(meter, named.collect())?
            };
            format::percent(&pattern, &values, meter)
        }
        "indent" => match &value {
            Value::Str(text) => indent(text, given, meter),
            Value::Undefined(message) => undefined(message),
            other => fail(format!("can only indent str, not {}", other.type_name())),
        },
        "replace" => {
            let [old, new, count] = given.bind(name, ["old", "new", "count"])?;
            let (Some(old), Some(new)) = (old, new) else {
                return fail("replace() is missing an argument");
            };
            let count = int_or(count.as_ref(), -1)?;
            methods::replace(&text(&value)?, &text(&old)?, &text(&new)?, count, meter)
        }
        "round" => round(&value, given),
        "safe" | "string" => {
            given.none(name)?;
            Ok(Value::Str(text(&value)?))
        }
        "pprint" => {
            let mut out = String::new();
            super::text::repr(&value, meter, &mut out)?;
            Value::text(meter, out)
        }
        "striptags" => {
            given.none(name)?;
            Ok(Value::str(strip_tags(&text(&value)?)))
        }
        "tojson" => to_json(&value, given, meter),
        "trim" => {
            let [chars] = given.bind(name, ["chars"])?;
            let text = text(&value)?;
            Ok(Value::str(methods::strip(
                &text,
                chars.as_ref(),
                true,
                true,
            )?))
        }
        "truncate" => truncate(value, given, meter),
        "urlencode" => {
            given.none(name)?;
            url_encode(&value, meter)
        }
        "wordcount" => {
            given.none(name)?;
            let text = text(&value)?;
            let words = text.split(|c: char| !(c.is_alphanumeric() || c == '_'));
            Ok(Value::Int(
                words.filter(|word| !word.is_empty()).count() as i128
            ))
        }
        other => fail(format!("No filter named '{other}'.")),
    }
}

fn abs(value: &Value, given: Given) -> Res<Value> {
    given.none("abs")?;
    match value {
        Value::Undefined(message) => undefined(message),
        Value::Float(number) => Ok(Value::Float(number.abs())),
        other => match other.as_int().and_then(i128::checked_abs) {
            Some(number) => Ok(Value::Int(number)),
            None => fail(format!(
                "bad operand type for abs(): '{}'",
                other.type_name()
            )),
        },
    }
}

fn parse_float(text: &str) -> Option<f64> {
    let text = text.trim_matches(is_space).replace('_', "");
    text.parse().ok()
}

fn int(value: &Value, given: Given) -> Res<Value> {
    let [default, base] = given.bind("int", ["default", "base"])?;
    let base = int_or(base.as_ref(), 10)?;
    let number = match value {
        Value::Str(text) => {
            let text = text.trim_matches(is_space).replace('_', "");
            let digits = match base {
                16 => text.trim_start_matches("0x").trim_start_matches("0X"),
                8 => text.trim_start_matches("0o").trim_start_matches("0O"),
                2 => text.trim_start_matches("0b").trim_start_matches("0B"),
                _ => &text,
            };
            let base = u32::try_from(base)
                .ok()
                .filter(|base| (2..=36).contains(base));
            let whole = base.and_then(|base| i128::from_str_radix(digits, base).ok());
            whole.or_else(|| finite(parse_float(&text)?))
        }
        Value::Float(number) => finite(*number),
        Value::Undefined(message) => return undefined(message),
        other => other.as_int(),
    };
    Ok(number.map(Value::Int).or(default).unwrap_or(Value::Int(0)))
}

fn finite(number: f64) -> Option<i128> {
    number.is_finite().then_some(number as i128)
}

/// Jinja's `title`: words begin after white space, hyphens and opening brackets.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut start = true;
    for c in text.chars() {
        match start {
            true => out.extend(c.to_uppercase()),
            false => out.extend(c.to_lowercase()),
        }
        start = is_space(c) || matches!(c, '-' | '(' | '{' | '[' | '<');
    }
    out
}

fn indent(text: &str, given: Given, meter: &Meter) -> Res<Value> {
    let [width, first, blank] = given.bind("indent", ["width", "first", "blank"])?;
    let indention = match &width {
        Some(Value::Str(text)) => text.to_string(),
        width => {
            let width = int_or(width.as_ref(), 4)?.max(0);
            let width = usize::try_from(width).unwrap_or(usize::MAX);
            meter.bytes(width)?;
            " ".repeat(width)
        }
    };
    // Lines are those of Python; an ending break is kept as an empty line.
    let padded = format!("{text}\n");
    let lines = methods::lines(&padded, false);
    meter.bytes(
        lines
            .len()
            .saturating_mul(indention.len())
            .saturating_add(text.len()),
    )?;
    let mut out = String::new();
    for (at, line) in lines.iter().enumerate() {
        if at > 0 {
            out.push('\n');
        }
        let wanted = if at == 0 {
            truth(first.as_ref())
        } else {
            !line.is_empty() || truth(blank.as_ref())
        };
        if wanted {
            out.push_str(&indention);
        }
        out.push_str(line);
    }
    Ok(Value::str(out))
}

fn round(value: &Value, given: Given) -> Res<Value> {
    let [precision, method] = given.bind("round", ["precision", "method"])?;
    let precision = int_or(precision.as_ref(), 0)?.clamp(-300, 300) as i32;
    let method = method.as_ref().and_then(Value::as_str).unwrap_or("common");
    if let Value::Undefined(message) = value {
        return undefined(message);
    }
    let Some(number) = value.as_float() else {
        return fail(format!(
            "type {} doesn't define __round__ method",
            value.type_name()
        ));
    };
    if let (Some(whole), "common") = (value.as_int(), method) {
        return Ok(Value::Int(round_int(whole, precision)));
    }
    let scale = 10f64.powi(precision);
    let rounded = match method {
        "ceil" => (number * scale).ceil() / scale,
        "floor" => (number * scale).floor() / scale,
        "common" if precision >= 0 => {
            // Halves go to the even neighbour, as the digits of the exact number say.
            format!("{number:.*}", precision as usize)
                .parse()
                .unwrap_or(number)
        }
        "common" => (number * scale).round_ties_even() / scale,
        _ => return fail("method must be common, ceil or floor"),
    };
    Ok(Value::Float(rounded))
}

/// Halves go to the even neighbour.
fn round_int(whole: i128, precision: i32) -> i128 {
    let Some(unit) = 10i128.checked_pow(precision.min(0).unsigned_abs()) else {
        return 0;
    };
    let (down, rest) = (whole.div_euclid(unit), whole.rem_euclid(unit));
    let up = rest > unit - rest || (rest == unit - rest && down % 2 != 0);
    (down + i128::from(up)).saturating_mul(unit)
}

fn strip_tags(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('<') {
        let Some(end) = rest[at..].find('>') else {
            break;
        };
        out.push_str(&rest[..at]);
        rest = &rest[at + end + 1..];
    }
    out.push_str(rest);
    let out = out
        .split(is_space)
        .filter(|word| !word.is_empty())
        .collect::<Vec<_>>()
        .join(" ");
    out.replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&#39;", "'")
        .replace("&#34;", "\"")
        .replace("&amp;", "&")
}

fn to_json(value: &Value, given: Given, meter: &Meter) -> Res<Value> {
    let [ascii, indent, separators, sort] = given.bind(
        "tojson",
        ["ensure_ascii", "indent", "separators", "sort_keys"],
    )?;
    let indent = match &indent {
        None | Some(Value::None) => None,
        Some(Value::Str(text)) => Some(text.to_string()),
        Some(width) => {
            let width = int_or(Some(width), 0)?.max(0);
            let width = usize::try_from(width).unwrap_or(usize::MAX);
            meter.bytes(width)?;
            Some(" ".repeat(width))
        }
    };
    let separators = match &separators {
        Some(Value::Seq(seq)) => match &seq.items[..] {
            [Value::Str(item), Value::Str(key)] => (item.clone(), key.clone()),
            _ => return fail("separators must be a pair of str"),
        },
        _ => (
            if indent.is_some() { "," } else { ", " }.into(),
            ": ".into(),
        ),
    };
    let (ascii, sort_keys) = (truth(ascii.as_ref()), truth(sort.as_ref()));
    let mut out = String::new();
    json(
        value,
        &JsonStyle {
            indent,
            separators,
            ascii,
            sort_keys,
        },
        meter,
        &mut out,
    )?;
    Ok(Value::str(out))
}

fn truncate(value: Value, given: Given, meter: &Meter) -> Res<Value> {
    let [length, kill, end, leeway] =
        given.bind("truncate", ["length", "killwords", "end", "leeway"])?;
    let length = int_or(length.as_ref(), 255)?;
    let leeway = int_or(leeway.as_ref(), 5)?;
    let end = match &end {
        Some(Value::Str(end)) => end.clone(),
        _ => "...".into(),
    };
    let end_length = end.chars().count() as i128;
    if length < end_length {
        return fail(format!("expected length >= {end_length}, got {length}"));
    }
    if value.length(meter)? as i128 <= length.saturating_add(leeway) {
        return Ok(value);
    }
    let Value::Str(text) = &value else {
        return fail(format!("can only truncate str, not {}", value.type_name()));
    };
    let kept: String = text.chars().take((length - end_length) as usize).collect();
    let kept = match kept.rsplit_once(' ') {
        Some((before, _)) if !truth(kill.as_ref()) => before,
        _ => &kept,
    };
    Ok(Value::str(format!("{kept}{end}")))
}

fn url_quote(text: &str, query: bool) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => {
                out.push(char::from(byte));
            }
            b'/' if !query => out.push('/'),
            b' ' if query => out.push('+'),
            byte => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

fn url_encode(value: &Value, meter: &Meter) -> Res<Value> {
    let pairs: Vec<(Value, Value)> = match value {
        Value::Dict(dict) => dict.entries.clone(),
        Value::Seq(_) => {
            let mut pairs = Vec::new();
            for item in value.items(meter)? {
                match &item.items(meter)?[..] {
                    [key, value] => pairs.push((key.clone(), value.clone())),
                    _ => return fail("not enough values to unpack (expected 2)"),
                }
            }
            pairs
        }
        other => {
            let text = str_of(other, meter)?;
            meter.bytes(text.len() * 3)?;
            return Ok(Value::str(url_quote(&text, false)));
        }
    };
    let mut parts = Vec::new();
    for (key, value) in pairs {
        let (key, value) = (str_of(&key, meter)?, str_of(&value, meter)?);
        meter.bytes((key.len() + value.len()) * 3)?;
        parts.push(format!(
            "{}={}",
            url_quote(&key, true),
            url_quote(&value, true)
        ));
    }
    Ok(Value::str(parts.join("&")))
}
