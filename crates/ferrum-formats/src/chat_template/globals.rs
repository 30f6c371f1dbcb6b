//! Functions that every template can call.

use super::args::{bind, int_or, need_str};
use super::budget::{Stop, charge, fail};
use super::clock::strftime;
use super::semantics::items_of;
use super::value::{Cycler, Dict, List, Namespace, dict, into_bounded, text_of};
use minijinja::value::{Rest, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

/// The longest range that may be made, as in Jinja's sandbox.
const MAX_RANGE: i128 = 100_000;

/// Makes the functions known to the engine that are the same for all renderings.
pub(super) fn register(env: &mut Environment<'static>) {
    env.add_function("range", range);
    env.add_function("dict", |state: &State, args: Rest<ValueOrKwargs>| {
        Dict::charged(state, pairs_of(state, args)?)
    });
    env.add_function(
        "raise_exception",
        |state: &State, args: Rest<ValueOrKwargs>| {
            let [message] = bind(state, &args.into_values(), ["message"])?;
            let message = text_of(state, &message.unwrap_or(().into()))?;
            Err::<Value, Error>(Stop::Raised(message.to_string()).into())
        },
    );
    env.add_function("joiner", |state: &State, args: Rest<ValueOrKwargs>| {
        let [separator] = bind(state, &args.into_values(), ["sep"])?;
        let items = vec![Value::from(""), separator.unwrap_or(", ".into())];
        cycler(state, items, true)
    });
    env.add_function("cycler", |state: &State, items: Rest<Value>| {
        if items.is_empty() {
            return fail("cycler() needs a value");
        }
        let items = items.iter().map(|item| into_bounded(state, item.clone()));
        cycler(state, items.collect::<Result<_, _>>()?, false)
    });
}

/// Namespaces of a rendering. They may hold themselves, so they are emptied at its end, one by one while all
/// are held here: nothing is dropped within another.
#[derive(Debug, Default)]
pub(super) struct Namespaces(Mutex<Vec<Arc<Namespace>>>);

impl Drop for Namespaces {
    fn drop(&mut self) {
        for namespace in self
            .0
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
        {
            namespace.clear();
        }
    }
}

/// The functions of one rendering.
pub(super) fn of_rendering(
    now: SystemTime,
    namespaces: &Arc<Namespaces>,
) -> [(&'static str, Value); 2] {
    let strftime_now = move |state: &State, args: Rest<ValueOrKwargs>| {
        let [format] = bind(state, &args.into_values(), ["format"])?;
        let format = need_str(format.as_ref())?;
        charge(state, 64 * format.len() as u64)?;
        Ok::<_, Error>(strftime(now, format))
    };
    let namespaces = Arc::downgrade(namespaces);
    let namespace = move |state: &State, args: Rest<ValueOrKwargs>| {
        charge(state, 1024)?;
        let namespace = Arc::new(Namespace::default());
        for (name, value) in pairs_of(state, args)? {
            namespace.set(&text_of(state, &name)?, value)?;
        }
        if let Some(namespaces) = namespaces.upgrade() {
            namespaces
                .0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(namespace.clone());
        }
        Ok::<_, Error>(Value::from_dyn_object(namespace))
    };
    [
        ("strftime_now", Value::from_function(strftime_now)),
        ("namespace", Value::from_function(namespace)),
    ]
}

/// The entries that arguments of `dict` and `namespace` give.
fn pairs_of(state: &State, args: Rest<ValueOrKwargs>) -> Result<Vec<(Value, Value)>, Error> {
    let mut pairs = Vec::new();
    for arg in args.into_values() {
        if arg.is_kwargs() {
            for name in arg.try_iter()? {
                pairs.push((name.clone(), into_bounded(state, arg.get_item(&name)?)?));
            }
        } else if let Some(from) = dict(&arg) {
            charge(state, 128 * from.items.len() as u64)?;
            pairs.extend(
                from.items
                    .iter()
                    .map(|(key, value)| (key.clone(), value.clone())),
            );
        } else {
            for pair in items_of(state, &arg)? {
                match &items_of(state, &pair)?[..] {
                    [key, value] => pairs.push((key.clone(), value.clone())),
                    other => {
                        let length = other.len();
                        return fail(format!(
                            "an element of dict() has length {length}, expected 2"
                        ));
                    }
                }
            }
        }
    }
    Ok(pairs)
}

fn range(state: &State, args: Rest<Value>) -> Result<Value, Error> {
    let number = |at: usize| match args.get(at) {
        Some(value) if value.is_undefined() => fail("range() of a variable or key that is missing"),
        value => int_or(value, 0).map(i128::from),
    };
    let (start, stop, step) = match args.len() {
        1 => (0, number(0)?, 1),
        2 => (number(0)?, number(1)?, 1),
        3 => (number(0)?, number(1)?, number(2)?),
        found => return fail(format!("range() takes 1 to 3 arguments, found {found}")),
    };
    if step == 0 {
        return fail("range() arg 3 must not be zero");
    }
    let span = if step > 0 { stop - start } else { start - stop };
    let size = step.abs();
    let count = span.max(0) / size + i128::from(span > 0 && span % size != 0);
    if count > MAX_RANGE {
        return fail(format!(
            "range too big: {count} numbers, at most {MAX_RANGE} are allowed"
        ));
    }
    let items = (0..count).map(|at| Value::from((start + at * step) as i64));
    List::charged(state, items.collect(), false)
}

fn cycler(state: &State, items: Vec<Value>, joiner: bool) -> Result<Value, Error> {
    charge(state, 128 + 24 * items.len() as u64)?;
    let items = List::new(items, true)?;
    Ok(Value::from_object(Cycler::new(items, joiner)))
}
