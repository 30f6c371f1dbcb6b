//! What a program calls in place of the engine's own instructions: Python's operators on our values.

use super::budget::{charge, fail};
use super::methods;
use super::semantics::{compare, formatted, items_of, unsupported};
use super::value::{
    BoundMethod, Dict, List, Namespace, Size, dict, into_bounded, list, text_of, type_name,
};
use minijinja::formatting::FormatStyle;
use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value};

/// Makes the operators known to the engine, under names that are no names of filters.
pub(super) fn register(env: &mut Environment<'static>) {
    env.add_filter("@list", |state: &State, items: &Value| {
        into_bounded(state, items.clone())
    });
    env.add_filter("@tuple", |state: &State, items: &Value| {
        List::charged(state, items_of(state, items)?, true)
    });
    env.add_filter("@dict", |state: &State, items: &Value| {
        let items = items_of(state, items)?;
        let pairs = items
            .chunks_exact(2)
            .map(|pair| (pair[0].clone(), pair[1].clone()));
        Dict::charged(state, pairs.collect())
    });
    env.add_filter("@unpack", unpack);
    env.add_filter("@attribute", attribute);
    env.add_filter("@set_attribute", set_attribute);
    env.add_filter("@iterable", |state: &State, value: &Value| {
        match value.kind() {
            ValueKind::Map => Ok(value.clone()),
            _ if list(value).is_some() => Ok(value.clone()),
            _ => List::charged(state, items_of(state, value)?, false),
        }
    });
    env.add_filter("@item", item);
    env.add_filter("@slice", slice);
    env.add_filter("@add", add);
    env.add_filter("@multiply", multiply);
    env.add_filter("@remainder", remainder);
    env.add_filter("@concat", |state: &State, a: &Value, b: &Value| {
        let (a, b) = (text_of(state, a)?, text_of(state, b)?);
        charge(state, (a.len() + b.len()) as u64)?;
        Ok::<_, Error>([&*a, &*b].concat())
    });
    for name in ["==", "!=", "<", "<=", ">", ">="] {
        env.add_filter(
            ["@", name].concat(),
            move |state: &State, a: &Value, b: &Value| compare(state, name, a, b),
        );
    }
    env.add_filter("@in", contains);
    env.add_filter(
        "@compare",
        |state: &State, a: &Value, b: &Value, operator: &str| {
            let result = match operator {
                "Eq" => compare(state, "==", a, b),
                "Ne" => compare(state, "!=", a, b),
                "Lt" => compare(state, "<", a, b),
                "Lte" => compare(state, "<=", a, b),
                "Gt" => compare(state, ">", a, b),
                "Gte" => compare(state, ">=", a, b),
                "In" => contains(state, a, b),
                _ => contains(state, a, b).map(|found| !found),
            };
            Ok::<_, Error>(Value::from(vec![result?.into(), b.clone()]))
        },
    );
    env.add_filter("@method", method);
    // What a macro keeps of the variables around it is kept until the end of the rendering.
    env.add_filter("@macro", |state: &State, _: &Value| charge(state, 1024));
}

fn unpack(state: &State, value: &Value, expected: usize) -> Result<Value, Error> {
    let items = items_of(state, value)?;
    match items.len() {
        found if found < expected => fail(format!(
            "not enough values to unpack (expected {expected}, got {found})"
        )),
        found if found > expected => {
            fail(format!("too many values to unpack (expected {expected})"))
        }
        _ => Ok(items.into()),
    }
}

/// `value.name`, a method before an item as in Python.
pub(super) fn attribute(value: &Value, name: &str) -> Result<Value, Error> {
    if methods::exists(value, name) {
        return BoundMethod::value(value.clone(), name);
    }
    if value.is_undefined() {
        return fail(format!(
            "cannot read '{name}' of a variable or key that is missing"
        ));
    }
    let found = value
        .as_object()
        .and_then(|object| object.get_value(&name.into()));
    Ok(found.unwrap_or_default())
}

fn set_attribute(state: &State, value: &Value, target: &Value, name: &str) -> Result<(), Error> {
    let Some(namespace) = target.downcast_object_ref::<Namespace>() else {
        return fail(format!(
            "cannot set '{name}' of '{}' object, only of a namespace",
            type_name(target)
        ));
    };
    charge(state, 128)?;
    namespace.set(name, into_bounded(state, value.clone())?)
}

/// `value[key]`.
fn item(state: &State, value: &Value, key: &Value) -> Result<Value, Error> {
    if value.is_undefined() {
        return fail("cannot read an item of a variable or key that is missing");
    }
    if let Some(text) = value.as_str()
        && let Some(at) = key.as_i64()
    {
        charge(state, text.len() as u64)?;
        let at = if at < 0 {
            at + text.chars().count() as i64
        } else {
            at
        };
        let found = usize::try_from(at).ok().and_then(|at| text.chars().nth(at));
        return Ok(found.map(|c| c.to_string().into()).unwrap_or_default());
    }
    if let Some(object) = value.as_object()
        && let Some(found) = object.get_value(key)
    {
        return into_bounded(state, found);
    }
    match key.as_str() {
        Some(name) => attribute(value, name),
        None => Ok(Value::UNDEFINED),
    }
}

/// `value[start:stop:step]`.
fn slice(
    state: &State,
    value: &Value,
    start: &Value,
    stop: &Value,
    step: &Value,
) -> Result<Value, Error> {
    let bound = |value: &Value| match value.is_none() {
        true => Ok(None),
        false => super::args::int_or(Some(value), 0).map(Some),
    };
    let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    if step == 0 {
        return fail("slice step cannot be zero");
    }
    if let Some(text) = value.as_str() {
        charge(state, 5 * text.len() as u64)?;
        let chars: Vec<char> = text.chars().collect();
        return Ok(indices(chars.len(), start, stop, step)
            .map(|at| chars[at])
            .collect::<String>()
            .into());
    }
    match list(value) {
        Some(list) => {
            let items =
                indices(list.items.len(), start, stop, step).map(|at| list.items[at].clone());
            charge(state, 24 * list.items.len() as u64)?;
            List::charged(state, items.collect(), list.tuple)
        }
        None if value.is_undefined() => fail("cannot slice a variable or key that is missing"),
        None => fail(format!("'{}' object cannot be sliced", type_name(value))),
    }
}

/// The indices of a slice, as Python's `slice.indices`.
fn indices(
    len: usize,
    start: Option<i64>,
    stop: Option<i64>,
    step: i64,
) -> impl Iterator<Item = usize> {
    let len = len as i64;
    let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let place = |bound: Option<i64>, default: i64| match bound {
        Some(at) if at < 0 => at.saturating_add(len).clamp(low, high),
        Some(at) => at.clamp(low, high),
        None => default,
    };
    let mut at = place(start, if step > 0 { low } else { high });
    let stop = place(stop, if step > 0 { high } else { low });
    std::iter::from_fn(move || {
        let current = at;
        let more = if step > 0 { at < stop } else { at > stop };
        at = at.saturating_add(step);
        more.then_some(current as usize)
    })
}

/// An operator on two integers, or on two numbers.
fn arithmetic(
    operator: &str,
    a: &Value,
    b: &Value,
    integers: fn(i128, i128) -> Option<i128>,
    floats: fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    let is_number = |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    if !is_number(a) || !is_number(b) {
        return unsupported(operator, a, b);
    }
    let is_float = |value: &Value| value.is_number() && !value.is_integer();
    if is_float(a) || is_float(b) {
        let (Ok(a), Ok(b)) = (f64::try_from(a.clone()), f64::try_from(b.clone())) else {
            return unsupported(operator, a, b);
        };
        return Ok(floats(a, b).into());
    }
    let (Ok(a), Ok(b)) = (i128::try_from(a.clone()), i128::try_from(b.clone())) else {
        return fail("an integer is too large");
    };
    match integers(a, b) {
        Some(result) => Ok(i64::try_from(result).map_or_else(|_| result.into(), Value::from)),
        None => fail(format!(
            "the result of {a} {operator} {b} is no number or too large"
        )),
    }
}

pub(super) fn add(state: &State, a: &Value, b: &Value) -> Result<Value, Error> {
    if let (Some(a), Some(b)) = (a.as_str(), b.as_str()) {
        charge(state, (a.len() + b.len()) as u64)?;
        return Ok([a, b].concat().into());
    }
    match (list(a), list(b)) {
        (Some(first), Some(second)) if first.tuple == second.tuple => {
            charge(state, 24 * (first.items.len() + second.items.len()) as u64)?;
            List::charged(
                state,
                [&first.items[..], &second.items[..]].concat(),
                first.tuple,
            )
        }
        _ => arithmetic("+", a, b, i128::checked_add, |a, b| a + b),
    }
}

fn multiply(state: &State, a: &Value, b: &Value) -> Result<Value, Error> {
    for (value, count) in [(a, b), (b, a)] {
        let Some(count) = count
            .as_i64()
            .filter(|_| count.is_integer() || count.kind() == ValueKind::Bool)
        else {
            continue;
        };
        let count = usize::try_from(count).unwrap_or(0);
        if let Some(text) = value.as_str() {
            charge(state, (text.len() as u64).saturating_mul(count as u64))?;
            return Ok(text.repeat(count).into());
        }
        if let Some(list) = list(value) {
            charge(
                state,
                (24 * list.items.len() as u64).saturating_mul(count as u64),
            )?;
            // Nothing, however often, takes no time.
            let count = if list.items.is_empty() { 0 } else { count };
            let items = (0..count).flat_map(|_| list.items.iter().cloned());
            return List::charged(state, items.collect(), list.tuple);
        }
    }
    arithmetic("*", a, b, i128::checked_mul, |a, b| a * b)
}

fn remainder(state: &State, a: &Value, b: &Value) -> Result<Value, Error> {
    if let Some(pattern) = a.as_str() {
        let values = list(b)
            .filter(|list| list.tuple)
            .map_or(std::slice::from_ref(b), |list| &list.items[..]);
        return formatted(state, FormatStyle::Printf, pattern, values);
    }
    // The sign of the divisor, as in Python.
    let integers = |a: i128, b: i128| Some((a.checked_rem(b)?.checked_add(b)?) % b);
    let floats = |a: f64, b: f64| (a % b + b) % b;
    arithmetic("%", a, b, integers, floats)
}

/// `needle in container`.
pub(super) fn contains(state: &State, needle: &Value, container: &Value) -> Result<bool, Error> {
    if let Some(text) = container.as_str() {
        charge(state, text.len() as u64)?;
        return match needle.as_str() {
            Some(needle) => Ok(text.contains(needle)),
            None => fail(format!(
                "'in <string>' requires string as left operand, not {}",
                type_name(needle)
            )),
        };
    }
    if let Some(list) = list(container) {
        for item in &list.items {
            if compare(state, "==", item, needle)? {
                return Ok(true);
            }
        }
        return Ok(false);
    }
    match dict(container) {
        Some(dict) if needle.as_object().is_none() => Ok(dict.items.contains_key(needle)),
        Some(_) => fail(format!("unhashable type: '{}'", type_name(needle))),
        None if container.is_undefined() => Ok(false),
        None => fail(format!(
            "argument of type '{}' is not iterable",
            type_name(container)
        )),
    }
}

/// `value.name(…)`, the name last.
fn method(state: &mut State, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = args.into_values();
    let Some(([value, args @ ..], name)) = args.split_last().map(|(name, rest)| (rest, name))
    else {
        return fail("a call of nothing");
    };
    let (name, mut owned) = (
        name.as_str().unwrap_or_default(),
        Vec::with_capacity(args.len()),
    );
    for arg in args {
        if name == "changed" {
            charge(state, Size::of(arg).bytes)?;
        }
        owned.push(into_bounded(state, arg.clone())?);
    }
    if value.is_undefined() {
        return fail(format!(
            "cannot call '{name}' of a variable or key that is missing"
        ));
    }
    if let Some(text) = value.as_str() {
        let result = methods::of_text(state, text, name, &owned)?;
        return into_bounded(state, result);
    }
    if owned.is_empty() && name == "cycle" {
        return fail("cycle() needs a value");
    }
    let result = value.call_method(state, name, &owned)?;
    into_bounded(state, result)
}
