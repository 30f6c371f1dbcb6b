//! Tests: what may follow `is`.

use super::ast::Compare;
use super::call::Given;
use super::filters;
use super::interp::Interp;
use super::meter::{Res, fail};
use super::ops;
use super::text::str_of;
use super::value::{SeqKind, Value, undefined};
use std::rc::Rc;

const NAMES: [&str; 39] = [
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "boolean",
    "callable",
    "defined",
    "divisibleby",
    "eq",
    "equalto",
    "escaped",
    "even",
    "false",
    "filter",
    "float",
    "ge",
    "gt",
    "greaterthan",
    "in",
    "integer",
    "iterable",
    "le",
    "lessthan",
    "lower",
    "lt",
    "mapping",
    "ne",
    "none",
    "number",
    "odd",
    "sameas",
    "sequence",
    "string",
    "test",
    "true",
    "undefined",
    "upper",
];

/// Whether a test holds.
pub(super) fn check(interp: &Interp, name: &str, value: &Value, given: Given) -> Res<bool> {
    let meter = &interp.meter;
    meter.step(1)?;
    let compare = match name {
        "eq" | "==" | "equalto" => Some(Compare::Eq),
        "ne" | "!=" => Some(Compare::Ne),
        "lt" | "<" | "lessthan" => Some(Compare::Lt),
        "le" | "<=" => Some(Compare::Le),
        "gt" | ">" | "greaterthan" => Some(Compare::Gt),
        "ge" | ">=" => Some(Compare::Ge),
        "in" => Some(Compare::In),
        _ => None,
    };
    if let Some(op) = compare {
        let [other] = given.bind(name, ["other"])?;
        let Some(other) = other else {
            return fail(format!("test '{name}' needs an argument"));
        };
        return ops::compare(op, value, &other, meter);
    }
    if matches!(name, "divisibleby" | "sameas") {
        let [other] = given.bind(name, ["other"])?;
        let Some(other) = other else {
            return fail(format!("test '{name}' needs an argument"));
        };
        if name == "sameas" {
            return same(value, &other, interp);
        }
        let rest = ops::binary(super::ast::Binary::Mod, value, &other, meter)?;
        return rest.equals(&Value::Int(0), meter);
    }
    given.none(name)?;
    Ok(match name {
        "defined" => !value.is_undefined(),
        "undefined" => value.is_undefined(),
        "none" => matches!(value, Value::None),
        "boolean" => matches!(value, Value::Bool(_)),
        "true" => matches!(value, Value::Bool(true)),
        "false" => matches!(value, Value::Bool(false)),
        "integer" => matches!(value, Value::Int(_)),
        "float" => matches!(value, Value::Float(_)),
        "number" => value.as_float().is_some(),
        "string" => matches!(value, Value::Str(_)),
        "mapping" => matches!(value, Value::Dict(_)),
        "sequence" => match value {
            Value::Str(_) | Value::Dict(_) | Value::Undefined(_) => true,
            Value::Seq(seq) => matches!(
                seq.kind,
                SeqKind::List | SeqKind::Tuple | SeqKind::Range | SeqKind::Group
            ),
            _ => false,
        },
        "iterable" => matches!(
            value,
            Value::Str(_) | Value::Dict(_) | Value::Undefined(_) | Value::Seq(_)
        ),
        "callable" => matches!(value, Value::Func(_) | Value::Undefined(_)),
        "escaped" => false,
        "odd" | "even" => {
            let Some(number) = value.as_int() else {
                if let Value::Undefined(message) = value {
                    return undefined(message);
                }
                return match value {
                    Value::Float(number) => {
                        Ok(number.rem_euclid(2.0) == if name == "odd" { 1.0 } else { 0.0 })
                    }
                    _ => fail("not all arguments converted during string formatting"),
                };
            };
            (number.rem_euclid(2) == 1) == (name == "odd")
        }
        "lower" | "upper" => {
            let text = str_of(value, meter)?;
            let (some, none) = match name {
                "lower" => (
                    char::is_lowercase as fn(char) -> bool,
                    char::is_uppercase as fn(char) -> bool,
                ),
                _ => (
                    char::is_uppercase as fn(char) -> bool,
                    char::is_lowercase as fn(char) -> bool,
                ),
            };
            text.chars().any(some) && !text.chars().any(none)
        }
        "filter" => value
            .as_str()
            .is_some_and(|name| filters::NAMES.contains(&name)),
        "test" => value.as_str().is_some_and(|name| NAMES.contains(&name)),
        other => return fail(format!("No test named '{other}'.")),
    })
}

/// Python's `is`, as far as values have an identity here.
fn same(a: &Value, b: &Value, interp: &Interp) -> Res<bool> {
    Ok(match (a, b) {
        (Value::Seq(a), Value::Seq(b)) => Rc::ptr_eq(a, b),
        (Value::Dict(a), Value::Dict(b)) => Rc::ptr_eq(a, b),
        (Value::Bool(_), Value::Bool(_))
        | (Value::Int(_), Value::Int(_))
        | (Value::Str(_), Value::Str(_)) => a.equals(b, &interp.meter)?,
        (Value::None, Value::None) => true,
        (Value::Func(a), Value::Func(b)) => Rc::ptr_eq(a, b),
        _ => false,
    })
}
