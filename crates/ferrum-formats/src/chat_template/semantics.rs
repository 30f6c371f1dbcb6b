//! Python's iteration, comparison and formatting of values.

use super::budget::{charge, fail};
use super::value::{Size, into_bounded, list, type_name};
use minijinja::formatting::{FormatStyle, format};
use minijinja::value::ValueKind;
use minijinja::{Error, State, Value};
use std::cmp::Ordering;

/// The items that walking a value gives. The walk is charged to the render budget.
pub(super) fn items_of(state: &State, value: &Value) -> Result<Vec<Value>, Error> {
    match value.kind() {
        ValueKind::Undefined => return Ok(Vec::new()),
        ValueKind::String | ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => {}
        _ => return fail(format!("'{}' object is not iterable", type_name(value))),
    }
    let count = value
        .as_str()
        .map_or_else(|| value.len().unwrap_or(0), str::len);
    charge(state, 24 * count as u64)?;
    value
        .try_iter()?
        .checked()
        .map(|item| into_bounded(state, item?))
        .collect()
}

/// A pattern with values in it.
pub(super) fn formatted(
    state: &State,
    style: FormatStyle,
    pattern: &str,
    values: &[Value],
) -> Result<Value, Error> {
    let fields = pattern.matches(['%', '{']).count() as u64;
    // The widest field that the pattern asks for; widths among the values would not be seen.
    let digits = pattern
        .split(|c: char| !c.is_ascii_digit())
        .map(str::len)
        .max()
        .unwrap_or(0);
    let from_values = match style {
        FormatStyle::Printf => pattern.contains('*'),
        FormatStyle::StrFormat => has_nested_fields(&pattern.replace("{{", "").replace("}}", "")),
    };
    if digits > 4 || from_values {
        return fail("a width in a format string is too large, or not in the string");
    }
    let mut largest = 10_u64.pow(digits as u32);
    for value in values {
        largest = largest.saturating_add(Size::of(value).bytes);
    }
    charge(
        state,
        (pattern.len() as u64).saturating_add(fields.saturating_mul(largest)),
    )?;
    Ok(format(style, pattern, values)?.into())
}

/// Whether a field of `str.format` has fields in it.
fn has_nested_fields(pattern: &str) -> bool {
    let mut depth = 0_i64;
    pattern.chars().any(|c| {
        depth += i64::from(c == '{') - i64::from(c == '}');
        depth > 1
    })
}

/// `a operator b`.
pub(super) fn compare(state: &State, operator: &str, a: &Value, b: &Value) -> Result<bool, Error> {
    // `loop` as it is compares the items beside it, however large.
    let (a, b) = (
        &into_bounded(state, a.clone())?,
        &into_bounded(state, b.clone())?,
    );
    charge(state, Size::of(a).bytes.min(Size::of(b).bytes))?;
    match operator {
        "==" => return Ok(a == b),
        "!=" => return Ok(a != b),
        _ => {}
    }
    let is_number = |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    let alike = is_number(a) && is_number(b)
        || a.as_str().is_some() && b.as_str().is_some()
        || list(a)
            .zip(list(b))
            .is_some_and(|(a, b)| a.tuple == b.tuple);
    if !alike {
        return unsupported(operator, a, b);
    }
    let order = a.cmp(b);
    Ok(match operator {
        "<" => order == Ordering::Less,
        "<=" => order != Ordering::Greater,
        ">" => order == Ordering::Greater,
        _ => order != Ordering::Less,
    })
}

pub(super) fn unsupported<T>(operator: &str, a: &Value, b: &Value) -> Result<T, Error> {
    if a.is_undefined() || b.is_undefined() {
        return fail(format!(
            "an operand of '{operator}' is a variable or key that is missing"
        ));
    }
    fail(format!(
        "unsupported operand types for '{operator}': '{}' and '{}'",
        type_name(a),
        type_name(b)
    ))
}
