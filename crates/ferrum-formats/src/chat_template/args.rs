//! Arguments of functions, given by place or by name as Python does.

use super::budget::fail;
use super::value::{into_bounded, type_name};
use minijinja::{Error, State, Value};
use std::array;

/// The arguments in the order of the parameters' names.
pub(super) fn bind<const N: usize>(
    state: &State,
    args: &[Value],
    names: [&str; N],
) -> Result<[Option<Value>; N], Error> {
    let mut bound = place(state, args, &names)?.into_iter();
    Ok(array::from_fn(|_| bound.next().flatten()))
}

/// The arguments in the order of the parameters' names, one for each name.
pub(super) fn place(
    state: &State,
    args: &[Value],
    names: &[&str],
) -> Result<Vec<Option<Value>>, Error> {
    let (places, named) = match args.split_last() {
        Some((last, rest)) if last.is_kwargs() => (rest, Some(last)),
        _ => (args, None),
    };
    if places.len() > names.len() {
        return fail(format!(
            "takes at most {} arguments, found {}",
            names.len(),
            places.len()
        ));
    }
    let mut bound: Vec<_> = places.iter().cloned().map(Some).collect();
    bound.resize(names.len(), None);
    for key in named
        .into_iter()
        .filter_map(|named| named.try_iter().ok())
        .flatten()
    {
        let name = key.as_str().unwrap_or_default();
        let value = named
            .map(|named| named.get_item(&key))
            .transpose()?
            .unwrap_or_default();
        match names.iter().position(|known| *known == name) {
            Some(at) if bound[at].is_none() => bound[at] = Some(into_bounded(state, value)?),
            Some(_) => return fail(format!("argument '{name}' is given twice")),
            None => return fail(format!("no argument is named '{name}'")),
        }
    }
    Ok(bound)
}

/// An integer argument; `None` and a missing one give the default.
pub(super) fn int_or(value: Option<&Value>, default: i64) -> Result<i64, Error> {
    match value {
        None => Ok(default),
        Some(value) if value.is_none() => Ok(default),
        Some(value) => match value.as_i64() {
            Some(number) => Ok(number),
            None => fail(format!(
                "'{}' object cannot be interpreted as an integer",
                type_name(value)
            )),
        },
    }
}

/// A string argument that must be there.
pub(super) fn need_str(value: Option<&Value>) -> Result<&str, Error> {
    match value.map(|value| (value, value.as_str())) {
        Some((_, Some(text))) => Ok(text),
        Some((value, None)) => fail(format!("an argument must be str, not {}", type_name(value))),
        None => fail("an argument is missing"),
    }
}

/// Whether an argument is true; missing is false.
pub(super) fn truth(value: Option<&Value>) -> bool {
    value.is_some_and(Value::is_true)
}
