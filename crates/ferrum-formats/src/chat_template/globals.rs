//! Functions that every template can call.

use super::call::{Given, int_or, need_str};
use super::clock::strftime;
use super::interp::Interp;
use super::meter::{Fault, Meter, Res, fail};
use super::text::str_of;
use super::value::{Dict, Func, Seq, SeqKind, Value, undefined};
use std::cell::{Cell, RefCell};
use std::rc::Rc;

const NAMES: [&str; 7] = [
    "range",
    "dict",
    "namespace",
    "joiner",
    "cycler",
    "raise_exception",
    "strftime_now",
];

/// The longest range that may be made, as in Jinja's sandbox.
const MAX_RANGE: i128 = 100_000;

/// The function of a name.
pub(super) fn find(name: &str) -> Option<Value> {
    NAMES
        .iter()
        .find(|known| **known == name)
        .map(|name| Value::func(Func::Global(name)))
}

/// Calls a function.
pub(super) fn call(interp: &Interp, name: &str, given: Given) -> Res<Value> {
    let meter = &interp.meter;
    match name {
        "range" => range(given, meter),
        "dict" => Ok(Value::Dict(Rc::new(dict(given, meter)?))),
        "namespace" => {
            let dict = dict(given, meter)?;
            for (key, _) in &dict.entries {
                check_field(key.as_str().unwrap_or(""))?;
            }
            let shared = Rc::new(RefCell::new(dict));
            interp.keep_namespace(&shared);
            Ok(Value::Namespace(shared))
        }
        "joiner" => {
            let [separator] = given.bind(name, ["sep"])?;
            let separator = match &separator {
                Some(separator) => str_of(separator, meter)?,
                None => ", ".into(),
            };
            Ok(Value::func(Func::Joiner(separator, Cell::new(false))))
        }
        "cycler" => {
            if given.positional.is_empty() {
                return fail("at least one item has to be provided");
            }
            let items = Seq::new(meter, SeqKind::Tuple, given.positional)?;
            Ok(Value::func(Func::Cycler(items, Cell::new(0))))
        }
        "raise_exception" => {
            let [message] = given.bind(name, ["message"])?;
            let message = message.unwrap_or(Value::None);
            Err(Fault::Raised(str_of(&message, meter)?.to_string()))
        }
        _ => {
            let [format] = given.bind(name, ["format"])?;
            let format = need_str(format.as_ref(), name)?;
            meter.bytes(format.len() * 8)?;
            Ok(Value::str(strftime(interp.now, &format)))
        }
    }
}

/// Names with an underscore are not for templates.
pub(super) fn check_field(name: &str) -> Res<()> {
    if name.starts_with('_') {
        return fail(format!(
            "Chat templates cannot store underscore-prefixed attributes on a namespace, but got \
             '{name}'. Please rename the attribute."
        ));
    }
    Ok(())
}

fn range(given: Given, meter: &Meter) -> Res<Value> {
    let numbers = given.positional.iter().map(|value| match value {
        Value::Undefined(message) => undefined(message),
        value => int_or(Some(value), 0),
    });
    let numbers: Vec<i128> = numbers.collect::<Res<_>>()?;
    let (start, stop, step) = match numbers[..] {
        [stop] => (0, stop, 1),
        [start, stop] => (start, stop, 1),
        [start, stop, step] => (start, stop, step),
        _ => return fail("range expected 1 to 3 arguments"),
    };
    if step == 0 {
        return fail("range() arg 3 must not be zero");
    }
    let span = if step > 0 {
        stop.saturating_sub(start)
    } else {
        start.saturating_sub(stop)
    };
    let size = step.saturating_abs();
    let count = (span.max(0) / size) + i128::from(span > 0 && span % size != 0);
    if count > MAX_RANGE {
        return fail(format!(
            "Range too big. The sandbox blocks ranges larger than MAX_RANGE ({MAX_RANGE})."
        ));
    }
    let items = (0..count).map(|at| Value::Int(start.saturating_add(at.saturating_mul(step))));
    Value::seq(meter, SeqKind::Range, items.collect())
}

fn dict(given: Given, meter: &Meter) -> Res<Dict> {
    let mut dict = Dict::default();
    if given.positional.len() > 1 {
        return fail(format!(
            "dict expected at most 1 argument, got {}",
            given.positional.len()
        ));
    }
    match given.positional.first() {
        Some(Value::Dict(from)) => {
            for (key, value) in &from.entries {
                dict.insert(meter, key.clone(), value.clone())?;
            }
        }
        Some(pairs) => {
            for pair in pairs.items(meter)? {
                match &pair.items(meter)?[..] {
                    [key, value] => dict.insert(meter, key.clone(), value.clone())?,
                    other => {
                        return fail(format!(
                            "dictionary update sequence element has length {}; 2 is required",
                            other.len()
                        ));
                    }
                }
            }
        }
        None => {}
    }
    for (name, value) in given.named {
        dict.insert(meter, Value::Str(name), value)?;
    }
    Ok(dict)
}
