//! Values as text: Python's `str` and `repr`, and JSON as `json.dumps` writes it.

use super::meter::{Meter, Res, fail};
use super::value::{Func, SeqKind, Value};
use std::fmt::Write;
use std::sync::Arc;

/// `str(value)`.
pub(super) fn str_of(value: &Value, meter: &Meter) -> Res<Arc<str>> {
    match value {
        Value::Str(text) => Ok(text.clone()),
        Value::Undefined(_) => Ok("".into()),
        other => {
            let mut out = String::new();
            repr(other, meter, &mut out)?;
            Ok(out.into())
        }
    }
}

/// `repr(value)`, appended.
pub(super) fn repr(value: &Value, meter: &Meter, out: &mut String) -> Res<()> {
    let before = out.len();
    match value {
        Value::Undefined(_) => out.push_str("Undefined"),
        Value::None => out.push_str("None"),
        Value::Bool(true) => out.push_str("True"),
        Value::Bool(false) => out.push_str("False"),
        Value::Int(number) => push(out, format_args!("{number}")),
        Value::Float(number) => out.push_str(&float(*number)),
        Value::Str(text) => repr_str(text, out),
        Value::Seq(seq) => match seq.kind {
            SeqKind::List => repr_items(&seq.items, ("[", "]"), meter, out)?,
            SeqKind::Tuple | SeqKind::Group => {
                let close = if seq.items.len() == 1 { ",)" } else { ")" };
                repr_items(&seq.items, ("(", close), meter, out)?;
            }
            SeqKind::Range => repr_range(&seq.items, out),
            SeqKind::Generator => out.push_str("<generator object>"),
            SeqKind::Keys => repr_items(&seq.items, ("dict_keys([", "])"), meter, out)?,
            SeqKind::Values => repr_items(&seq.items, ("dict_values([", "])"), meter, out)?,
            SeqKind::Items => repr_items(&seq.items, ("dict_items([", "])"), meter, out)?,
        },
        Value::Dict(dict) => repr_pairs(&dict.entries, meter, out)?,
        Value::Namespace(dict) => {
            out.push_str("<Namespace ");
            // Held for writing while it is printed: met again inside itself, it is `{...}`.
            match dict.try_borrow_mut() {
                Ok(dict) => meter.nested(|| repr_pairs(&dict.entries, meter, out))?,
                Err(_) => out.push_str("{...}"),
            }
            out.push('>');
        }
        Value::Func(func) => match &**func {
            Func::Global(name) => push(out, format_args!("<function {name}>")),
            Func::Method(_, name) => push(out, format_args!("<built-in method {name}>")),
            Func::Macro(node, _) => push(out, format_args!("<Macro '{}'>", node.name)),
            Func::Loop(state) => {
                let (at, of) = (state.index.get() + 1, state.items.items.len());
                push(out, format_args!("<LoopContext {at}/{of}>"));
            }
            Func::Joiner(..) => out.push_str("<Joiner>"),
            Func::Cycler(..) => out.push_str("<Cycler>"),
        },
    }
    meter.bytes(out.len().saturating_sub(before).min(64))
}

fn push(out: &mut String, text: std::fmt::Arguments) {
    // Writing to a string does not fail.
    let _ = out.write_fmt(text);
}

fn repr_items(items: &[Value], ends: (&str, &str), meter: &Meter, out: &mut String) -> Res<()> {
    out.push_str(ends.0);
    for (at, item) in items.iter().enumerate() {
        if at > 0 {
            out.push_str(", ");
        }
        repr(item, meter, out)?;
        if let Value::Str(text) = item {
            meter.bytes(text.len())?;
        }
    }
    out.push_str(ends.1);
    Ok(())
}

fn repr_pairs(pairs: &[(Value, Value)], meter: &Meter, out: &mut String) -> Res<()> {
    out.push('{');
    for (at, (key, value)) in pairs.iter().enumerate() {
        if at > 0 {
            out.push_str(", ");
        }
        for (part, end) in [(key, ": "), (value, "")] {
            repr(part, meter, out)?;
            if let Value::Str(text) = part {
                meter.bytes(text.len())?;
            }
            out.push_str(end);
        }
    }
    out.push('}');
    Ok(())
}

fn repr_range(items: &[Value], out: &mut String) {
    let at = |index: usize| items.get(index).and_then(Value::as_int).unwrap_or(0);
    let step = if items.len() > 1 { at(1) - at(0) } else { 1 };
    let stop = if items.is_empty() {
        0
    } else {
        at(items.len() - 1) + step
    };
    push(out, format_args!("range({}, {stop}", at(0)));
    if step != 1 {
        push(out, format_args!(", {step}"));
    }
    out.push(')');
}

/// A string in quotes, single ones if that needs no escape.
fn repr_str(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            c => match u32::from(c) {
                code @ 0..=0xFF => push(out, format_args!("\\x{code:02x}")),
                code @ 0x100..=0xFFFF => push(out, format_args!("\\u{code:04x}")),
                code => push(out, format_args!("\\U{code:08x}")),
            },
        }
    }
    out.push(quote);
}

/// `str.isprintable`: Rust's `Debug` escapes the same characters, and some marks besides.
fn is_printable(c: char) -> bool {
    if c == ' ' || matches!(c, '\'' | '"' | '\\') {
        return true;
    }
    let mut escaped = c.escape_debug();
    // A mark is escaped only at the start of a string; it comes second here.
    escaped.len() == 1 || {
        let shown = format!("{:?}", format_args!("a{c}").to_string());
        shown.chars().count() == 4 && escaped.next().is_some()
    }
}

/// `repr` of a float: the shortest text that reads back, with an exponent from 1e16 on.
pub(super) fn float(number: f64) -> String {
    if number.is_nan() {
        return "nan".into();
    }
    if number.is_infinite() {
        return if number > 0.0 {
            "inf".into()
        } else {
            "-inf".into()
        };
    }
    let text = format!("{number:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let mut text = format!("{number}");
        if !text.contains('.') {
            text.push_str(".0");
        }
        return text;
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// How JSON is laid out.
#[derive(Clone, Debug)]
pub(super) struct JsonStyle {
    /// Text of one level of indentation; none: all on one line.
    pub(super) indent: Option<String>,
    /// Between items, and between a key and its value.
    pub(super) separators: (Arc<str>, Arc<str>),
    pub(super) ascii: bool,
    pub(super) sort_keys: bool,
}

/// `json.dumps(value)`, appended.
pub(super) fn json(value: &Value, style: &JsonStyle, meter: &Meter, out: &mut String) -> Res<()> {
    Json {
        style,
        meter,
        out,
        level: 0,
    }
    .value(value)
}

struct Json<'a> {
    style: &'a JsonStyle,
    meter: &'a Meter,
    out: &'a mut String,
    level: usize,
}

impl Json<'_> {
    fn value(&mut self, value: &Value) -> Res<()> {
        self.meter.bytes(4)?;
        match value {
            Value::None => self.out.push_str("null"),
            Value::Bool(truth) => self.out.push_str(if *truth { "true" } else { "false" }),
            Value::Int(number) => push(self.out, format_args!("{number}")),
            Value::Float(number) => self.out.push_str(&json_float(*number)),
            Value::Str(text) => self.text(text)?,
            Value::Seq(seq)
                if matches!(seq.kind, SeqKind::List | SeqKind::Tuple | SeqKind::Group) =>
            {
                self.items(&seq.items)?;
            }
            Value::Dict(dict) => self.pairs(&dict.entries)?,
            other => {
                let name = other.type_name();
                return fail(format!("Object of type {name} is not JSON serializable"));
            }
        }
        Ok(())
    }

    fn line(&mut self) -> Res<()> {
        if let Some(indent) = &self.style.indent {
            self.meter.bytes(indent.len() * self.level)?;
            self.out.push('\n');
            for _ in 0..self.level {
                self.out.push_str(indent);
            }
        }
        Ok(())
    }

    fn between(&mut self, first: bool) -> Res<()> {
        if !first {
            self.out.push_str(&self.style.separators.0);
        }
        self.line()
    }

    fn items(&mut self, items: &[Value]) -> Res<()> {
        if items.is_empty() {
            self.out.push_str("[]");
            return Ok(());
        }
        self.out.push('[');
        self.level += 1;
        for (at, item) in items.iter().enumerate() {
            self.between(at == 0)?;
            self.value(item)?;
        }
        self.level -= 1;
        self.line()?;
        self.out.push(']');
        Ok(())
    }

    fn pairs(&mut self, pairs: &[(Value, Value)]) -> Res<()> {
        if pairs.is_empty() {
            self.out.push_str("{}");
            return Ok(());
        }
        let mut sorted: Vec<&(Value, Value)> = pairs.iter().collect();
        if self.style.sort_keys {
            let mut failed = None;
            sorted.sort_by(|a, b| match a.0.order(&b.0, "<", self.meter) {
                Ok(order) => order.unwrap_or(std::cmp::Ordering::Equal),
                Err(fault) => {
                    failed = Some(fault);
                    std::cmp::Ordering::Equal
                }
            });
            if let Some(fault) = failed {
                return Err(fault);
            }
        }
        self.out.push('{');
        self.level += 1;
        for (at, (key, value)) in sorted.into_iter().enumerate() {
            self.between(at == 0)?;
            match key {
                Value::Str(text) => self.text(text)?,
                Value::None => self.out.push_str("\"null\""),
                Value::Bool(truth) => push(self.out, format_args!("\"{truth}\"")),
                Value::Int(number) => push(self.out, format_args!("\"{number}\"")),
                Value::Float(number) => push(self.out, format_args!("\"{}\"", json_float(*number))),
                other => {
                    return fail(format!(
                        "keys must be str, int, float, bool or None, not {}",
                        other.type_name()
                    ));
                }
            }
            self.out.push_str(&self.style.separators.1);
            self.value(value)?;
        }
        self.level -= 1;
        self.line()?;
        self.out.push('}');
        Ok(())
    }

    fn text(&mut self, text: &str) -> Res<()> {
        self.meter.bytes(text.len())?;
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\x08' => self.out.push_str("\\b"),
                '\x0c' => self.out.push_str("\\f"),
                c if c < ' ' || (self.style.ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        push(self.out, format_args!("\\u{unit:04x}"));
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
        Ok(())
    }
}

fn json_float(number: f64) -> String {
    if number.is_nan() {
        return "NaN".into();
    }
    if number.is_infinite() {
        return if number > 0.0 {
            "Infinity".into()
        } else {
            "-Infinity".into()
        };
    }
    float(number)
}
