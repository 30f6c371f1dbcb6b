//! `tojson` as transformers defines it: `json.dumps`, without escapes for HTML and with all its letters.

use super::args::{bind, int_or, truth};
use super::budget::{charge, fail};
use super::value::{Size, dict, float, list, type_name};
use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Error, State, Value};
use std::fmt::Write;

/// How JSON is laid out.
struct Writer<'a> {
    state: &'a State<'a, 'a>,
    /// Text of one level of indentation; none: all on one line.
    indent: Option<String>,
    /// Between items, and between a key and its value.
    separators: (String, String),
    ascii: bool,
    sort_keys: bool,
    level: usize,
    out: String,
}

/// The filter.
pub(super) fn to_json(state: &State, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let names = ["value", "ensure_ascii", "indent", "separators", "sort_keys"];
    let [value, ascii, indent, separators, sort_keys] = bind(state, &args.into_values(), names)?;
    let value = value.unwrap_or_default();
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => match indent.as_str() {
            Some(text) => Some(text.to_owned()),
            None => {
                let width = u64::try_from(int_or(Some(&indent), 0)?).unwrap_or(0);
                charge(state, width)?;
                Some(" ".repeat(width as usize))
            }
        },
    };
    let separators = match separators.filter(|separators| !separators.is_none()) {
        Some(separators) => match list(&separators).map(|list| &list.items[..]) {
            Some([item, key]) if item.as_str().is_some() && key.as_str().is_some() => {
                (item.to_string(), key.to_string())
            }
            _ => return fail("separators must be a pair of str"),
        },
        None => (
            if indent.is_some() { "," } else { ", " }.to_owned(),
            ": ".to_owned(),
        ),
    };
    charge(state, 2 * Size::of(&value).bytes)?;
    let (ascii, sort_keys) = (truth(ascii.as_ref()), truth(sort_keys.as_ref()));
    let out = String::new();
    let mut writer = Writer {
        state,
        indent,
        separators,
        ascii,
        sort_keys,
        level: 0,
        out,
    };
    writer.value(&value)?;
    Ok(writer.out.into())
}

impl Writer<'_> {
    fn value(&mut self, value: &Value) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self
                .out
                .push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)),
            ValueKind::String => self.text(value.as_str().unwrap_or_default()),
            _ => {
                if let Some(list) = list(value) {
                    return self.items(list.items.iter().map(|item| (None, item)), ('[', ']'));
                }
                let Some(dict) = dict(value) else {
                    return fail(format!(
                        "Object of type {} is not JSON serializable",
                        type_name(value)
                    ));
                };
                let mut pairs: Vec<_> = dict
                    .items
                    .iter()
                    .map(|(key, value)| (Some(key), value))
                    .collect();
                if self.sort_keys {
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.items(pairs.into_iter(), ('{', '}'))?;
            }
        }
        Ok(())
    }

    fn items<'v>(
        &mut self,
        items: impl ExactSizeIterator<Item = (Option<&'v Value>, &'v Value)>,
        (open, close): (char, char),
    ) -> Result<(), Error> {
        self.out.push(open);
        self.level += 1;
        let none = items.len() == 0;
        for (at, (key, value)) in items.enumerate() {
            if at > 0 {
                charge(self.state, self.separators.0.len() as u64)?;
                self.out.push_str(&self.separators.0);
            }
            self.line()?;
            if let Some(key) = key {
                match key.kind() {
                    ValueKind::String => self.text(key.as_str().unwrap_or_default()),
                    ValueKind::None => self.out.push_str("\"null\""),
                    ValueKind::Bool => self.out.push_str(if key.is_true() {
                        "\"true\""
                    } else {
                        "\"false\""
                    }),
                    _ => {
                        let number = number(key);
                        self.out.extend(["\"", &number, "\""]);
                    }
                }
                charge(self.state, self.separators.1.len() as u64)?;
                self.out.push_str(&self.separators.1);
            }
            self.value(value)?;
        }
        self.level -= 1;
        if !none {
            self.line()?;
        }
        self.out.push(close);
        Ok(())
    }

    fn line(&mut self) -> Result<(), Error> {
        if let Some(indent) = &self.indent {
            charge(
                self.state,
                (indent.len() as u64).saturating_mul(self.level as u64),
            )?;
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(&**indent, self.level));
        }
        Ok(())
    }

    fn text(&mut self, text: &str) {
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
                c if c < ' ' || (self.ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        // Writing to a string does not fail.
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()).unwrap_or(f64::NAN) {
        number if number.is_nan() => "NaN".into(),
        number if number.is_infinite() => if number > 0.0 {
            "Infinity"
        } else {
            "-Infinity"
        }
        .into(),
        number => float(number),
    }
}
