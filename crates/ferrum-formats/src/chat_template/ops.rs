//! Operators.

use super::ast::{Binary, Compare};
use super::format;
use super::meter::{Meter, Res, fail};
use super::text::str_of;
use super::value::{SeqKind, Value, undefined};
use std::cmp::Ordering;

fn symbol(op: Binary) -> &'static str {
    match op {
        Binary::Add => "+",
        Binary::Sub => "-",
        Binary::Mul => "*",
        Binary::Div => "/",
        Binary::FloorDiv => "//",
        Binary::Mod => "%",
        Binary::Pow => "** or pow()",
    }
}

/// Arithmetic, and what texts and lists make of it.
pub(super) fn binary(op: Binary, left: &Value, right: &Value, meter: &Meter) -> Res<Value> {
    if let (Binary::Mod, Value::Str(pattern)) = (op, left) {
        return format::percent(pattern, right, meter);
    }
    if let Value::Undefined(message) = left {
        return undefined(message);
    }
    if let Value::Undefined(message) = right {
        return undefined(message);
    }
    if let (Some(a), Some(b)) = (left.as_int(), right.as_int()) {
        return integers(op, a, b);
    }
    if let (Some(a), Some(b)) = (left.as_float(), right.as_float()) {
        return floats(op, a, b);
    }
    match (op, left, right) {
        (Binary::Add, Value::Str(a), Value::Str(b)) => {
            meter.bytes(a.len() + b.len())?;
            Ok(Value::str([&**a, &**b].concat()))
        }
        (Binary::Add, Value::Seq(a), Value::Seq(b))
            if a.kind == b.kind && matches!(a.kind, SeqKind::List | SeqKind::Tuple) =>
        {
            meter.bytes((a.items.len() + b.items.len()) * size_of::<Value>())?;
            Value::seq(meter, a.kind, [&a.items[..], &b.items[..]].concat())
        }
        (Binary::Mul, text @ Value::Str(_), count) | (Binary::Mul, count, text @ Value::Str(_))
            if count.as_int().is_some() =>
        {
            let (text, count) = (text.as_str().unwrap_or(""), count.as_int().unwrap_or(0));
            let count = usize::try_from(count.max(0)).unwrap_or(usize::MAX);
            meter.bytes(text.len().saturating_mul(count))?;
            Ok(Value::str(if text.is_empty() {
                String::new()
            } else {
                text.repeat(count)
            }))
        }
        (Binary::Mul, Value::Seq(seq), count) | (Binary::Mul, count, Value::Seq(seq))
            if count.as_int().is_some() && matches!(seq.kind, SeqKind::List | SeqKind::Tuple) =>
        {
            let count = usize::try_from(count.as_int().unwrap_or(0).max(0)).unwrap_or(usize::MAX);
            let count = if seq.items.is_empty() { 0 } else { count };
            meter.bytes(
                seq.items
                    .len()
                    .saturating_mul(count)
                    .saturating_mul(size_of::<Value>()),
            )?;
            let repeated = std::iter::repeat_n(&seq.items, count).flatten().cloned();
            Value::seq(meter, seq.kind, repeated.collect())
        }
        (Binary::Add, Value::Str(_), other) => fail(format!(
            "can only concatenate str (not \"{}\") to str",
            other.type_name()
        )),
        (op, a, b) => fail(format!(
            "unsupported operand type(s) for {}: '{}' and '{}'",
            symbol(op),
            a.type_name(),
            b.type_name()
        )),
    }
}

fn integers(op: Binary, a: i128, b: i128) -> Res<Value> {
    let result = match op {
        Binary::Add => a.checked_add(b),
        Binary::Sub => a.checked_sub(b),
        Binary::Mul => a.checked_mul(b),
        Binary::Div if b == 0 => return fail("division by zero"),
        Binary::Div => return Ok(Value::Float(a as f64 / b as f64)),
        Binary::FloorDiv | Binary::Mod if b == 0 => {
            return fail("integer division or modulo by zero");
        }
        // Python rounds down, so the remainder has the sign of the divisor.
        Binary::FloorDiv => a
            .checked_div(b)
            .map(|quotient| quotient - i128::from(a % b != 0 && (a < 0) != (b < 0))),
        Binary::Mod => a.checked_rem(b).map(|rest| {
            if rest != 0 && (rest < 0) != (b < 0) {
                rest + b
            } else {
                rest
            }
        }),
        Binary::Pow if b < 0 => return floats(op, a as f64, b as f64),
        Binary::Pow => u32::try_from(b).ok().and_then(|b| a.checked_pow(b)),
    };
    match result {
        Some(number) => Ok(Value::Int(number)),
        None => fail("an integer is too large"),
    }
}

fn floats(op: Binary, a: f64, b: f64) -> Res<Value> {
    if b == 0.0 && matches!(op, Binary::Div | Binary::FloorDiv | Binary::Mod) {
        return fail(if op == Binary::Div {
            "float division by zero"
        } else {
            "float modulo"
        });
    }
    let modulo = || {
        let rest = a % b;
        if rest != 0.0 && (rest < 0.0) != (b < 0.0) {
            rest + b
        } else {
            rest
        }
    };
    Ok(Value::Float(match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
        Binary::FloorDiv => ((a - modulo()) / b).round(),
        Binary::Mod => modulo(),
        Binary::Pow if a == 0.0 && b < 0.0 => {
            return fail("0.0 cannot be raised to a negative power");
        }
        Binary::Pow if a.is_finite() && b.is_finite() && !a.powf(b).is_finite() => {
            return fail("Numerical result out of range");
        }
        Binary::Pow => a.powf(b),
    }))
}

/// `-a` and `+a`.
pub(super) fn signed(value: &Value, negative: bool) -> Res<Value> {
    match value {
        Value::Undefined(message) => undefined(message),
        Value::Float(number) => Ok(Value::Float(if negative { -number } else { *number })),
        other => match other.as_int() {
            Some(number) => Ok(Value::Int(if negative {
                number.wrapping_neg()
            } else {
                number
            })),
            None => fail(format!(
                "bad operand type for unary {}: '{}'",
                if negative { '-' } else { '+' },
                other.type_name()
            )),
        },
    }
}

/// A comparison.
pub(super) fn compare(op: Compare, left: &Value, right: &Value, meter: &Meter) -> Res<bool> {
    let ordered = |symbol, holds: fn(Ordering) -> bool| {
        Ok(left.order(right, symbol, meter)?.is_some_and(holds))
    };
    match op {
        Compare::Eq => left.equals(right, meter),
        Compare::Ne => Ok(!left.equals(right, meter)?),
        Compare::Lt => ordered("<", Ordering::is_lt),
        Compare::Le => ordered("<=", Ordering::is_le),
        Compare::Gt => ordered(">", Ordering::is_gt),
        Compare::Ge => ordered(">=", Ordering::is_ge),
        Compare::In => contains(right, left, meter),
        Compare::NotIn => Ok(!contains(right, left, meter)?),
    }
}

/// `item in container`.
pub(super) fn contains(container: &Value, item: &Value, meter: &Meter) -> Res<bool> {
    match container {
        Value::Str(text) => match item {
            Value::Str(part) => {
                meter.step(text.len() / 64)?;
                Ok(text.contains(&**part))
            }
            Value::Undefined(message) => undefined(message),
            other => fail(format!(
                "'in <string>' requires string as left operand, not {}",
                other.type_name()
            )),
        },
        Value::Dict(dict) => match item {
            Value::Seq(seq) if seq.kind == SeqKind::List => fail("unhashable type: 'list'"),
            Value::Dict(_) => fail("unhashable type: 'dict'"),
            item => Ok(dict.get(item).is_some()),
        },
        Value::Seq(_) | Value::Undefined(_) => {
            for held in container.items(meter)? {
                if held.equals(item, meter)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        other => fail(format!(
            "argument of type '{}' is not iterable",
            other.type_name()
        )),
    }
}

/// `a ~ b`.
pub(super) fn concat(parts: &[Value], meter: &Meter) -> Res<Value> {
    let mut out = String::new();
    for part in parts {
        let text = str_of(part, meter)?;
        meter.bytes(text.len())?;
        out.push_str(&text);
    }
    Ok(Value::str(out))
}

/// `a[start:stop:step]`.
pub(super) fn slice(value: &Value, bounds: [Option<i128>; 3], meter: &Meter) -> Res<Option<Value>> {
    let step = bounds[2].unwrap_or(1);
    if step == 0 {
        return fail("slice step cannot be zero");
    }
    match value {
        Value::Str(text) => {
            meter.bytes(text.len() * 5)?;
            let chars: Vec<char> = text.chars().collect();
            let picked: String = indices(chars.len(), bounds, step)
                .map(|at| chars[at])
                .collect();
            Ok(Some(Value::str(picked)))
        }
        Value::Seq(seq) if matches!(seq.kind, SeqKind::List | SeqKind::Tuple | SeqKind::Range) => {
            meter.bytes(seq.items.len() * size_of::<Value>())?;
            let picked = indices(seq.items.len(), bounds, step).map(|at| seq.items[at].clone());
            Ok(Some(Value::seq(meter, seq.kind, picked.collect())?))
        }
        _ => Ok(None),
    }
}

/// The indices of a slice, as Python's `slice.indices`.
fn indices(len: usize, bounds: [Option<i128>; 3], step: i128) -> impl Iterator<Item = usize> {
    let len = len as i128;
    let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let place = |bound: Option<i128>, default: i128| match bound {
        Some(at) if at < 0 => (at.saturating_add(len)).clamp(low, high),
        Some(at) => at.clamp(low, high),
        None => default,
    };
    let start = place(bounds[0], if step > 0 { low } else { high });
    let stop = place(bounds[1], if step > 0 { high } else { low });
    let mut at = start;
    std::iter::from_fn(move || {
        let more = if step > 0 { at < stop } else { at > stop };
        let current = at;
        at = at.saturating_add(step);
        more.then_some(current as usize)
    })
}
