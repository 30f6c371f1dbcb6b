//! Reading requests: every field is either taken or refused by name.
//!
//! A request is taken apart by hand rather than by a derived deserialiser, because what is wrong must be
//! told with the field's name in OpenAI's `param`, and because nothing may be ignored in silence: what
//! is left when a route has taken its fields is an error. A null is as good as an absent field.

use crate::error::ApiError;
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

type Result<T> = std::result::Result<T, ApiError>;

/// The fields of an object that have not been taken yet.
#[derive(Debug)]
pub(crate) struct Fields {
    /// Where the object is, with a dot at the end; empty for the request itself.
    path: String,
    map: Map<String, Value>,
}

impl Fields {
    /// The request.
    pub(crate) fn of_body(bytes: &[u8]) -> Result<Self> {
        let value = serde_json::from_slice(bytes)
            .map_err(|e| ApiError::malformed(format!("the body is not JSON: {e}")))?;
        match value {
            Value::Object(map) => Ok(Self {
                path: String::new(),
                map,
            }),
            other => Err(ApiError::malformed(format!(
                "the body: found {}, expected an object",
                kind(&other)
            ))),
        }
    }

    /// An object inside a request.
    pub(crate) fn of(value: Value, path: &str) -> Result<Self> {
        match value {
            Value::Object(map) => Ok(Self {
                path: format!("{path}."),
                map,
            }),
            other => Err(wrong(path, &other, "an object")),
        }
    }

    /// The name of a field from the request's point of view.
    pub(crate) fn name(&self, field: &str) -> String {
        format!("{}{field}", self.path)
    }

    /// A copy of a field that is still to be taken; null without one.
    pub(crate) fn peek(&self, field: &str) -> Value {
        self.map.get(field).cloned().unwrap_or_default()
    }

    /// The text of a field that is still to be taken.
    pub(crate) fn peek_text(&self, field: &str) -> Result<Option<String>> {
        match self.peek(field) {
            Value::Null => Ok(None),
            Value::String(text) => Ok(Some(text)),
            other => Err(wrong(&self.name(field), &other, "a string")),
        }
    }

    /// A field as it is.
    pub(crate) fn take(&mut self, field: &str) -> Option<Value> {
        #[cfg(test)]
        note::taken(&self.name(field), "any".into());
        self.map
            .shift_remove(field)
            .filter(|value| !value.is_null())
    }

    /// A field that must be there.
    pub(crate) fn need(&mut self, field: &str) -> Result<Value> {
        let value = self.take(field);
        value.ok_or_else(|| {
            let name = self.name(field);
            ApiError::invalid(name, "it is missing")
        })
    }

    pub(crate) fn text(&mut self, field: &str) -> Result<Option<String>> {
        let found = self.take(field);
        #[cfg(test)]
        note::taken(&self.name(field), "string".into());
        match found {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(&self.name(field), &other, "a string")),
        }
    }

    /// Text that must be there.
    pub(crate) fn need_text(&mut self, field: &str) -> Result<String> {
        match self.need(field)? {
            Value::String(text) => Ok(text),
            other => Err(wrong(&self.name(field), &other, "a string")),
        }
    }

    pub(crate) fn boolean(&mut self, field: &str) -> Result<Option<bool>> {
        let found = self.take(field);
        #[cfg(test)]
        note::taken(&self.name(field), "boolean".into());
        match found {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(wrong(&self.name(field), &other, "true or false")),
        }
    }

    pub(crate) fn list(&mut self, field: &str, most: usize) -> Result<Option<Vec<Value>>> {
        let name = self.name(field);
        match self.take(field) {
            None => Ok(None),
            Some(Value::Array(items)) if items.len() > most => {
                let found = items.len();
                let reason = format!("found {found} entries, expected at most {most}");
                Err(ApiError::invalid(name, reason))
            }
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(wrong(&name, &other, "an array")),
        }
    }

    pub(crate) fn object(&mut self, field: &str) -> Result<Option<Map<String, Value>>> {
        match self.take(field) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => Err(wrong(&self.name(field), &other, "an object")),
        }
    }

    pub(crate) fn int(&mut self, field: &str, range: RangeInclusive<i64>) -> Result<Option<i64>> {
        let name = self.name(field);
        let found = self.take(field);
        #[cfg(test)]
        note::taken(&name, note::int(&range));
        found.map(|v| int(&name, &v, range)).transpose()
    }

    pub(crate) fn count(
        &mut self,
        field: &str,
        range: RangeInclusive<usize>,
    ) -> Result<Option<usize>> {
        let bound = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let found = self.int(field, bound(*range.start())..=bound(*range.end()))?;
        // The range begins at 0 or above.
        Ok(found.and_then(|n| usize::try_from(n).ok()))
    }

    pub(crate) fn number(
        &mut self,
        field: &str,
        range: RangeInclusive<f32>,
    ) -> Result<Option<f32>> {
        let name = self.name(field);
        let found = self.take(field);
        #[cfg(test)]
        note::taken(&name, note::number(&range));
        found.map(|v| number(&name, &v, range)).transpose()
    }

    /// A field that is accepted only where it asks for nothing that this server lacks.
    pub(crate) fn harmless(
        &mut self,
        field: &str,
        fine: impl Fn(&Value) -> bool,
        expected: &str,
    ) -> Result<()> {
        match self.take(field) {
            Some(value) if !fine(&value) => {
                let reason = format!("not supported; expected {expected} or no such field");
                Err(ApiError::unsupported(self.name(field), reason))
            }
            _ => Ok(()),
        }
    }

    /// Nothing may be left.
    pub(crate) fn finish(self) -> Result<()> {
        match self.map.iter().find(|(_, value)| !value.is_null()) {
            Some((field, _)) => Err(ApiError::unknown(self.name(field))),
            None => Ok(()),
        }
    }
}

/// "found …, expected …" of a value.
pub(crate) fn wrong(name: &str, found: &Value, expected: &str) -> ApiError {
    ApiError::invalid(name, format!("found {}, expected {expected}", kind(found)))
}

pub(crate) fn int(name: &str, value: &Value, range: RangeInclusive<i64>) -> Result<i64> {
    let (low, high) = (range.start(), range.end());
    let expected = match *high {
        i64::MAX => format!("an integer of at least {low}"),
        high => format!("an integer from {low} to {high}"),
    };
    // 1.0 is an integer to clients whose language has only one kind of number.
    let whole = |x: &f64| x.fract() == 0.0 && x.abs() < 9e15;
    let found = value
        .as_i64()
        .or_else(|| value.as_f64().filter(whole).map(|x| x as i64));
    match found {
        Some(n) if range.contains(&n) => Ok(n),
        _ => Err(wrong(name, value, &expected)),
    }
}

pub(crate) fn number(name: &str, value: &Value, range: RangeInclusive<f32>) -> Result<f32> {
    let (low, high) = (*range.start(), *range.end());
    let expected = match (low, high) {
        (f32::MIN, f32::MAX) => "a number".into(),
        (f32::MIN_POSITIVE, f32::MAX) => "a number above 0".into(),
        (low, f32::MAX) => format!("a number of at least {low}"),
        (f32::MIN_POSITIVE, high) => format!("a number above 0, {high} at most"),
        (low, high) => format!("a number from {low} to {high}"),
    };
    // What is above 0, if ever so little, is above 0 as f32, too.
    let floor = if low == f32::MIN_POSITIVE {
        0.0
    } else {
        f64::from(low)
    };
    let above = |x: &f64| *x > floor || low != f32::MIN_POSITIVE && *x == floor;
    let within = |x: &f64| above(x) && *x <= f64::from(high);
    match value.as_f64().filter(within) {
        Some(x) => Ok((x as f32).clamp(low, high)),
        None => Err(wrong(name, value, &expected)),
    }
}

/// What a value is, in few words: numbers in full, longer things by kind.
fn kind(value: &Value) -> String {
    match value {
        Value::Null => "null".into(),
        Value::Bool(truth) => truth.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) if text.chars().count() <= 40 => format!("{text:?}"),
        Value::String(_) => "a string".into(),
        Value::Array(_) => "an array".into(),
        Value::Object(_) => "an object".into(),
    }
}

/// Notes which fields are taken and what is expected of them, for whoever describes them elsewhere.
#[cfg(test)]
pub(crate) mod note {
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::ops::RangeInclusive;

    thread_local! {
        static TAKEN: RefCell<BTreeMap<String, String>> = RefCell::default();
    }

    /// The fields that `act` takes, with what is expected of each.
    pub(crate) fn during(act: impl FnOnce()) -> BTreeMap<String, String> {
        TAKEN.take();
        act();
        TAKEN.take()
    }

    pub(super) fn taken(name: &str, expected: String) {
        let digits = |c: char| c.is_ascii_digit();
        let parts = name.split('[').map(|part| part.trim_start_matches(digits));
        let name = parts.collect::<Vec<_>>().join("[");
        TAKEN.with_borrow_mut(|taken| {
            let known = taken.entry(name).or_insert_with(|| expected.clone());
            if expected != "any" {
                *known = expected;
            }
        });
    }

    pub(super) fn int(range: &RangeInclusive<i64>) -> String {
        let (low, high) = (*range.start(), *range.end());
        bounds(
            "integer",
            low as f64,
            (high < i64::MAX).then_some(high as f64),
        )
    }

    pub(super) fn number(range: &RangeInclusive<f32>) -> String {
        let (low, high) = (*range.start(), *range.end());
        let low = if low == f32::MIN_POSITIVE { 0.0 } else { low };
        bounds(
            "number",
            low.into(),
            (high < f32::MAX).then_some(high.into()),
        )
    }

    pub(crate) fn bounds(kind: &str, low: f64, high: Option<f64>) -> String {
        match high {
            Some(high) => format!("{kind} {low} to {high}"),
            None => format!("{kind} from {low}"),
        }
    }
}
