//! The environment of all templates: filters, tests and how values are printed.
//!
//! Filters of the engine are used where they give what Python's give. Each is wrapped: the size of what it walks
//! through is charged before it runs, and its result is converted to ours.

use super::args::{bind, int_or, need_str, place, truth};
use super::budget::{MAX_DEPTH, MAX_OUTPUT_BYTES, MAX_STEPS, charge, exhausted, fail};
use super::value::{List, Size, Text, dict, into_bounded, text_of, type_name};
use super::{globals, json, methods, operators, semantics};
use minijinja::formatting::FormatStyle;
use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, Output, State, Value, filters, tests};
use minijinja_contrib::filters as contrib;
use std::borrow::Cow;
use std::sync::LazyLock;

/// Bytes that a rendering has written.
#[derive(Default)]
struct Written(u64);

/// The environment.
pub(super) static ENVIRONMENT: LazyLock<Environment<'static>> = LazyLock::new(|| {
    let mut env = Environment::empty();
    env.set_fuel(Some(MAX_STEPS));
    env.set_recursion_limit(MAX_DEPTH as usize);
    env.set_formatter(write);
    globals::register(&mut env);
    operators::register(&mut env);
    register_filters(&mut env);
    register_tests(&mut env);
    env
});

/// Prints a value.
fn write(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let text = match value.as_str() {
        Some(text) => Cow::Borrowed(text),
        None => {
            charge(state, 2 * Size::of(value).bytes)?;
            Cow::Owned(Text(value).to_string())
        }
    };
    let written = state.get_or_insert_extension_with(Written::default);
    written.0 += text.len() as u64;
    if written.0 > MAX_OUTPUT_BYTES {
        return Err(exhausted("output", MAX_OUTPUT_BYTES));
    }
    out.write_str(&text)?;
    Ok(())
}

/// How much of its arguments a filter walks through.
#[derive(Clone, Copy)]
enum Walk {
    /// The items of a list.
    Items,
    /// All that they hold, some of it many times.
    All,
}

fn register_filters(env: &mut Environment<'static>) {
    macro_rules! engine {
        ($($walk:ident $name:ident($($parameter:literal),*);)+) => {
            $(add_engine(env, stringify!($name), Walk::$walk, &[$($parameter),*], Value::from_function(filters::$name));)+
        };
    }
    // Filters that take their arguments by name as Python's do, or any number of them, have no names here.
    engine! {
        Items batch("linecount", "fill_with");
        Items first();
        Items items();
        Items last();
        Items reject();
        Items rejectattr();
        Items reverse();
        Items select();
        Items selectattr();
        Items slice("slices", "fill_with");
        All abs();
        All capitalize();
        All dictsort();
        All float("default");
        All indent("width", "first", "blank");
        All int("default", "base");
        All lower();
        All max();
        All min();
        All replace("old", "new");
        All sort();
        All title();
        All trim("chars");
        All unique();
        All upper();
        All urlencode();
    }
    let striptags = Value::from_function(contrib::striptags);
    add_engine(env, "striptags", Walk::All, &[], striptags);
    add_engine(
        env,
        "wordcount",
        Walk::All,
        &[],
        Value::from_function(contrib::wordcount),
    );
    env.add_filter("tojson", json::to_json);
    env.add_filter("attr", |value: &Value, name: &str| {
        match value.as_object() {
            Some(_) if dict(value).is_some() && !methods::exists(value, name) => {
                Ok(Value::UNDEFINED)
            }
            _ => operators::attribute(value, name),
        }
    });
    for name in ["default", "d"] {
        env.add_filter(name, |state: &State, args: Rest<ValueOrKwargs>| {
            let [value, default, lax] = bind(
                state,
                &args.into_values(),
                ["value", "default_value", "boolean"],
            )?;
            let value = value.unwrap_or_default();
            let absent = value.is_undefined() || truth(lax.as_ref()) && !value.is_true();
            Ok::<_, Error>(if absent {
                default.unwrap_or("".into())
            } else {
                value
            })
        });
    }
    for name in ["escape", "e", "forceescape"] {
        env.add_filter(name, escape);
    }
    env.add_filter("truncate", truncate);
    env.add_filter("round", round);
    env.add_filter("list", |state: &State, value: &Value| {
        List::charged(state, semantics::items_of(state, value)?, false)
    });
    for name in ["length", "count"] {
        env.add_filter(name, length);
    }
    for name in ["string", "safe"] {
        env.add_filter(name, |state: &State, value: &Value| {
            text_of(state, value).map(|text| Value::from(&*text))
        });
    }
    env.add_filter("join", join);
    env.add_filter("map", map);
    env.add_filter("sum", sum);
    env.add_filter("groupby", group_by);
    env.add_filter(
        "center",
        |state: &State, value: &Value, width: Option<usize>| {
            methods::padded(
                state,
                &text_of(state, value)?,
                "center",
                width.unwrap_or(80),
                " ",
            )
        },
    );
    env.add_filter(
        "format",
        |state: &State, pattern: &str, values: Rest<ValueOrKwargs>| {
            semantics::formatted(state, FormatStyle::Printf, pattern, &values.into_values())
        },
    );
}

fn add_engine(
    env: &mut Environment<'static>,
    name: &'static str,
    walk: Walk,
    parameters: &'static [&'static str],
    filter: Value,
) {
    let wrapped = move |state: &mut State, args: Rest<ValueOrKwargs>| {
        let mut args = args.into_values();
        if let Some((value, rest)) = args.split_first().filter(|_| !parameters.is_empty()) {
            let placed = place(state, rest, parameters)?;
            let given = placed
                .iter()
                .rposition(Option::is_some)
                .map_or(0, |last| last + 1);
            let value = value.clone();
            args = std::iter::once(value)
                .chain(
                    placed
                        .into_iter()
                        .take(given)
                        .map(Option::unwrap_or_default),
                )
                .collect();
        }
        for arg in &mut args {
            *arg = into_bounded(state, arg.clone())?;
        }
        charge(state, cost(name, walk, &args))?;
        let result = filter.call(state, &args)?;
        into_bounded(state, result)
    };
    env.add_filter(name, wrapped);
}

/// What a filter of the engine may walk through and make, in bytes.
fn cost(name: &str, walk: Walk, args: &[Value]) -> u64 {
    let Some((value, options)) = args.split_first() else {
        return 0;
    };
    let items = match value.as_str() {
        Some(text) if name == "trim" => text.len() as u64,
        Some(_) => 1,
        None => value.len().unwrap_or(0) as u64,
    };
    let mut cost = match walk {
        Walk::Items => 24 * value.len().unwrap_or(0) as u64,
        Walk::All => Size::of(value).bytes.saturating_mul(4),
    };
    for option in options {
        // A path is looked up in each item, a count is of lists that are made.
        let bytes = Size::of(option).bytes.saturating_mul(items);
        let lists = option.as_i64().filter(|_| matches!(walk, Walk::Items));
        let lists = lists.map_or(0, |count| count.unsigned_abs().saturating_mul(96));
        cost = cost.saturating_add(bytes).saturating_add(lists);
    }
    cost
}

fn escape(state: &State, value: &Value) -> Result<String, Error> {
    let text = text_of(state, value)?;
    charge(state, 6 * text.len() as u64)?;
    let text = text
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;");
    Ok(text.replace('\'', "&#39;").replace('"', "&#34;"))
}

fn round(state: &State, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let [value, precision, method] =
        bind(state, &args.into_values(), ["value", "precision", "method"])?;
    let value = value.unwrap_or_default();
    let precision = int_or(precision.as_ref(), 0)?.clamp(-300, 300) as i32;
    let method = method
        .as_ref()
        .map_or(Ok("common"), |method| need_str(Some(method)))?;
    if value.is_integer() && method == "common" && precision >= 0 {
        return Ok(value);
    }
    let Ok(number) = f64::try_from(value.clone()) else {
        return fail(format!("'{}' object cannot be rounded", type_name(&value)));
    };
    let scale = 10f64.powi(precision);
    Ok(Value::from(match method {
        "ceil" => (number * scale).ceil() / scale,
        "floor" => (number * scale).floor() / scale,
        // Halves go to the even neighbour, as the digits of the exact number say.
        "common" if precision >= 0 => format!("{number:.*}", precision as usize)
            .parse()
            .unwrap_or(number),
        "common" => (number * scale).round_ties_even() / scale,
        _ => return fail("method must be common, ceil or floor"),
    }))
}

fn truncate(state: &State, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let names = ["value", "length", "killwords", "end", "leeway"];
    let [value, length, kill, end, leeway] = bind(state, &args.into_values(), names)?;
    let value = text_of(state, &value.unwrap_or_default())?;
    let end = text_of(state, &end.unwrap_or("...".into()))?;
    charge(state, value.len() as u64)?;
    let (length, end_length) = (int_or(length.as_ref(), 255)?, end.chars().count() as i64);
    if length < end_length {
        return fail(format!(
            "truncate() needs a length of at least {end_length}, found {length}"
        ));
    }
    if value.chars().count() as i64 <= length.saturating_add(int_or(leeway.as_ref(), 5)?) {
        return Ok(Value::from(&*value));
    }
    let kept: String = value.chars().take((length - end_length) as usize).collect();
    let kept = match kept.rsplit_once(' ') {
        Some((before, _)) if !truth(kill.as_ref()) => before,
        _ => &kept,
    };
    Ok([kept, &*end].concat().into())
}

fn length(state: &State, value: &Value) -> Result<usize, Error> {
    if let Some(text) = value.as_str() {
        charge(state, text.len() as u64)?;
    }
    match value.len() {
        Some(length) => Ok(length),
        None if value.is_undefined() => Ok(0),
        None => fail(format!(
            "object of type '{}' has no len()",
            type_name(value)
        )),
    }
}

/// `value.a.b` for the filters that take an attribute.
fn attribute_path(state: &State, value: &Value, path: &str) -> Result<Value, Error> {
    charge(state, 16 * path.len() as u64)?;
    path.split('.')
        .try_fold(value.clone(), |value, name| match name.parse::<i64>() {
            Ok(at) => Ok(value.get_item(&at.into()).unwrap_or_default()),
            Err(_) => value.get_attr(name),
        })
}

fn join(state: &State, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let [value, separator, attribute] =
        bind(state, &args.into_values(), ["value", "d", "attribute"])?;
    let separator = text_of(state, &separator.unwrap_or("".into()))?;
    let mut out = String::new();
    for (at, item) in semantics::items_of(state, &value.unwrap_or_default())?
        .into_iter()
        .enumerate()
    {
        let item = match &attribute {
            Some(path) => attribute_path(state, &item, need_str(Some(path))?)?,
            None => item,
        };
        let (between, item) = (
            if at > 0 { &*separator } else { "" },
            text_of(state, &item)?,
        );
        charge(state, (between.len() + item.len()) as u64)?;
        out.extend([between, &*item]);
    }
    Ok(out)
}

/// Not the engine's, which takes no notice of arguments by name.
fn map(state: &mut State, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = args.into_values();
    let items = semantics::items_of(state, args.first().unwrap_or(&Value::UNDEFINED))?;
    let mut mapped = Vec::with_capacity(items.len());
    if let Some(filter) = args.get(1).and_then(Value::as_str) {
        for item in items {
            charge(state, 24 * args.len() as u64)?;
            let args: Vec<_> = std::iter::once(&item).chain(&args[2..]).cloned().collect();
            mapped.push(state.apply_filter(filter, &args)?);
        }
    } else {
        let [_, path, default] = bind(state, &args, ["value", "attribute", "default"])?;
        let Some(path) = path else {
            return fail("map() needs the name of a filter, or an attribute");
        };
        let (path, default) = (text_of(state, &path)?, default.unwrap_or_default());
        for item in items {
            let found = attribute_path(state, &item, &path)?;
            mapped.push(if found.is_undefined() {
                default.clone()
            } else {
                found
            });
        }
    }
    List::charged(state, mapped, false)
}

fn sum(state: &State, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let [value, attribute, start] =
        bind(state, &args.into_values(), ["value", "attribute", "start"])?;
    let mut sum = start.unwrap_or(0.into());
    for item in semantics::items_of(state, &value.unwrap_or_default())? {
        let item = match &attribute {
            Some(path) => attribute_path(state, &item, need_str(Some(path))?)?,
            None => item,
        };
        sum = operators::add(state, &sum, &item)?;
    }
    Ok(sum)
}

/// Pairs of a key, `grouper`, and the `list` of those that have it.
fn group_by(state: &State, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let [value, attribute, default] = bind(
        state,
        &args.into_values(),
        ["value", "attribute", "default"],
    )?;
    let path = need_str(attribute.as_ref())?;
    let mut keyed = Vec::new();
    for item in semantics::items_of(state, &value.unwrap_or_default())? {
        let key = attribute_path(state, &item, path)?;
        let key = if key.is_undefined() {
            default.clone().unwrap_or(key)
        } else {
            key
        };
        // Sorting compares each key with some twenty others.
        charge(state, Size::of(&key).bytes.saturating_mul(20))?;
        keyed.push((key, item));
    }
    keyed.sort_by(|a, b| a.0.cmp(&b.0));
    let groups = keyed.chunk_by(|a, b| a.0 == b.0).map(|group| {
        let items = group.iter().map(|(_, item)| item.clone()).collect();
        let (key, items) = (group[0].0.clone(), List::charged(state, items, false)?);
        List::group(state, key, items)
    });
    List::charged(state, groups.collect::<Result<_, _>>()?, false)
}

fn register_tests(env: &mut Environment<'static>) {
    env.add_test("defined", tests::is_defined);
    env.add_test("undefined", tests::is_undefined);
    env.add_test("none", tests::is_none);
    env.add_test("boolean", tests::is_boolean);
    env.add_test("true", tests::is_true);
    env.add_test("false", tests::is_false);
    env.add_test("integer", tests::is_integer);
    env.add_test("float", tests::is_float);
    env.add_test("odd", tests::is_odd);
    env.add_test("even", tests::is_even);
    env.add_test("divisibleby", tests::is_divisibleby);
    env.add_test("string", tests::is_string);
    env.add_test("mapping", tests::is_mapping);
    env.add_test("sameas", tests::is_sameas);
    env.add_test("filter", tests::is_filter);
    env.add_test("test", tests::is_test);
    env.add_test("escaped", |_: &Value| false);
    env.add_test("number", |value: &Value| {
        matches!(value.kind(), ValueKind::Number | ValueKind::Bool)
    });
    for name in ["sequence", "iterable"] {
        env.add_test(name, |value: &Value| {
            matches!(
                value.kind(),
                ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Undefined
            )
        });
    }
    env.add_test("callable", |value: &Value| type_name(value) == "function");
    for (name, test) in [
        ("lower", tests::is_lower as fn(&Value) -> bool),
        ("upper", tests::is_upper),
    ] {
        env.add_test(name, move |state: &State, value: &Value| {
            charge(state, Size::of(value).bytes)?;
            Ok::<_, Error>(test(value))
        });
    }
    for (names, operator) in [
        (["eq", "equalto", "=="], "=="),
        (["ne", "ne", "!="], "!="),
        (["lt", "lessthan", "<"], "<"),
        (["le", "le", "<="], "<="),
        (["gt", "greaterthan", ">"], ">"),
        (["ge", "ge", ">="], ">="),
    ] {
        for name in names {
            env.add_test(name, move |state: &State, a: &Value, b: &Value| {
                semantics::compare(state, operator, a, b)
            });
        }
    }
    env.add_test("in", operators::contains);
}
