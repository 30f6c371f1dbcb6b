//! Filters on sequences.

use super::ast::Binary;
use super::call::{Given, int_or, need_str, truth};
use super::checks;
use super::filters;
use super::interp::Interp;
use super::meter::{Meter, Res, fail};
use super::ops;
use super::text::str_of;
use super::value::{SeqKind, Value};
use std::cmp::Ordering;
use std::sync::Arc;

/// Applies a filter, if it is one of sequences.
pub(super) fn apply(
    interp: &Interp,
    name: &str,
    value: &Value,
    given: &Given,
) -> Option<Res<Value>> {
    let given = given.clone();
    let meter = &interp.meter;
    Some(match name {
        "batch" => batch(value, given, meter),
        "slice" => slice(value, given, meter),
        "dictsort" => dictsort(value, given, meter),
        "first" => given.none(name).and_then(|()| first(value, meter)),
        "last" => given.none(name).and_then(|()| last(value, meter)),
        "groupby" => groupby(interp, value, given),
        "items" => given.none(name).and_then(|()| items(value, meter)),
        "join" => join(interp, value, given),
        "list" => given
            .none(name)
            .and_then(|()| Value::list(meter, value.items(meter)?)),
        "map" => map(interp, value, given),
        "max" | "min" => extreme(interp, value, given, name),
        "reverse" => given.none(name).and_then(|()| reverse(value, meter)),
        "select" => select(interp, value, given, true),
        "reject" => select(interp, value, given, false),
        "selectattr" => select_attr(interp, value, given, true),
        "rejectattr" => select_attr(interp, value, given, false),
        "sort" => sort(interp, value, given),
        "sum" => sum(interp, value, given),
        "unique" => unique(interp, value, given),
        _ => return None,
    })
}

fn batch(value: &Value, given: Given, meter: &Meter) -> Res<Value> {
    let [count, fill] = given.bind("batch", ["linecount", "fill_with"])?;
    let count = usize::try_from(int_or(count.as_ref(), 0)?).unwrap_or(0);
    if count == 0 {
        return fail("batch() needs a positive number of items");
    }
    let mut batches = Vec::new();
    for chunk in value.items(meter)?.chunks(count) {
        let mut chunk = chunk.to_vec();
        if let Some(fill) = fill.as_ref().filter(|fill| !matches!(fill, Value::None)) {
            meter.bytes((count - chunk.len()).saturating_mul(size_of::<Value>()))?;
            chunk.resize(count, fill.clone());
        }
        batches.push(Value::list(meter, chunk)?);
    }
    Value::generator(meter, batches)
}

fn slice(value: &Value, given: Given, meter: &Meter) -> Res<Value> {
    let [count, fill] = given.bind("slice", ["slices", "fill_with"])?;
    let count = usize::try_from(int_or(count.as_ref(), 0)?).unwrap_or(0);
    if count == 0 {
        return fail("integer division or modulo by zero");
    }
    meter.bytes(count.saturating_mul(64))?;
    let items = value.items(meter)?;
    let (each, longer) = (items.len() / count, items.len() % count);
    let mut slices = Vec::new();
    let mut at = 0;
    for index in 0..count {
        let end = at + each + usize::from(index < longer);
        let mut part = items[at..end].to_vec();
        at = end;
        if let Some(fill) = fill.as_ref().filter(|fill| !matches!(fill, Value::None))
            && index >= longer
        {
            part.push(fill.clone());
        }
        slices.push(Value::list(meter, part)?);
    }
    Value::generator(meter, slices)
}

/// Sorts with a comparison that can fail.
fn sort_by<T>(items: &mut [T], mut order: impl FnMut(&T, &T) -> Res<Ordering>) -> Res<()> {
    let mut failed = None;
    items.sort_by(|a, b| {
        if failed.is_some() {
            return Ordering::Equal;
        }
        order(a, b).unwrap_or_else(|fault| {
            failed = Some(fault);
            Ordering::Equal
        })
    });
    failed.map_or(Ok(()), Err)
}

fn order_keys(a: &Value, b: &Value, meter: &Meter) -> Res<Ordering> {
    Ok(a.order(b, "<", meter)?.unwrap_or(Ordering::Equal))
}

/// Falsy values have no items for the filters that look at each item.
fn items_of(value: &Value, meter: &Meter) -> Res<Vec<Value>> {
    if value.truth() {
        value.items(meter)
    } else {
        Ok(Vec::new())
    }
}

/// Texts without case, unless case counts.
fn fold(value: Value, case_sensitive: bool, meter: &Meter) -> Res<Value> {
    match &value {
        Value::Str(text) if !case_sensitive => Value::text(meter, text.to_lowercase()),
        _ => Ok(value),
    }
}

fn dictsort(value: &Value, given: Given, meter: &Meter) -> Res<Value> {
    let [case, by, reverse] = given.bind("dictsort", ["case_sensitive", "by", "reverse"])?;
    let Value::Dict(dict) = value else {
        return fail(format!(
            "'{}' object has no attribute 'items'",
            value.type_name()
        ));
    };
    let by_value = match by.as_ref().map(|by| by.as_str()) {
        None | Some(Some("key")) => false,
        Some(Some("value")) => true,
        Some(_) => return fail("You can only sort by either \"key\" or \"value\""),
    };
    let mut keyed = Vec::new();
    for (key, value) in &dict.entries {
        let by = if by_value { value } else { key };
        keyed.push((
            fold(by.clone(), truth(case.as_ref()), meter)?,
            key.clone(),
            value.clone(),
        ));
    }
    order(&mut keyed, truth(reverse.as_ref()), |a, b| {
        order_keys(&a.0, &b.0, meter)
    })?;
    let pairs = keyed
        .into_iter()
        .map(|(_, key, value)| Value::tuple(meter, vec![key, value]));
    Value::list(meter, pairs.collect::<Res<_>>()?)
}

/// Sorts, equal items in their old order also when reversed.
fn order<T>(
    items: &mut [T],
    reverse: bool,
    mut by: impl FnMut(&T, &T) -> Res<Ordering>,
) -> Res<()> {
    sort_by(items, |a, b| if reverse { by(b, a) } else { by(a, b) })
}

fn first(value: &Value, meter: &Meter) -> Res<Value> {
    let found = match value {
        Value::Seq(seq) => {
            let from = if seq.kind == SeqKind::Generator {
                seq.taken.get()
            } else {
                0
            };
            seq.taken.set(from + 1);
            seq.items.get(from).cloned()
        }
        Value::Str(text) => text.chars().next().map(|c| Value::str(c.to_string())),
        Value::Dict(dict) => dict.entries.first().map(|(key, _)| key.clone()),
        other => other.items(meter)?.into_iter().next(),
    };
    Ok(found.unwrap_or_else(|| Value::Undefined("No first item, sequence was empty.".into())))
}

fn last(value: &Value, meter: &Meter) -> Res<Value> {
    if matches!(value, Value::Seq(seq) if seq.kind == SeqKind::Generator) {
        return fail("'generator' object is not reversible");
    }
    let found = value.items(meter)?.pop();
    Ok(found.unwrap_or_else(|| Value::Undefined("No last item, sequence was empty.".into())))
}

/// Reads `a.b.0` of an item; nothing given reads the item itself.
struct Getter {
    path: Vec<Value>,
    default: Option<Value>,
}

impl Getter {
    fn new(attribute: Option<&Value>, default: Option<Value>) -> Res<Self> {
        let path = match attribute {
            None | Some(Value::None) => Vec::new(),
            Some(Value::Str(path)) => path
                .split('.')
                .map(|part| match part.bytes().all(|b| b.is_ascii_digit()) {
                    true => part.parse().map_or_else(|_| Value::str(part), Value::Int),
                    false => Value::str(part),
                })
                .collect(),
            Some(other) => vec![other.clone()],
        };
        Ok(Getter { path, default })
    }

    fn get(&self, interp: &Interp, item: &Value) -> Res<Value> {
        let mut value = item.clone();
        for part in &self.path {
            value = interp.item(&value, part)?;
            if value.is_undefined()
                && let Some(default) = &self.default
            {
                value = default.clone();
            }
        }
        Ok(value)
    }
}

fn groupby(interp: &Interp, value: &Value, given: Given) -> Res<Value> {
    let meter = &interp.meter;
    let [attribute, default, case] =
        given.bind("groupby", ["attribute", "default", "case_sensitive"])?;
    let getter = Getter::new(attribute.as_ref(), default)?;
    let case = truth(case.as_ref());
    let mut keyed = Vec::new();
    for item in value.items(meter)? {
        let key = getter.get(interp, &item)?;
        keyed.push((fold(key.clone(), case, meter)?, key, item));
    }
    sort_by(&mut keyed, |a, b| order_keys(&a.0, &b.0, meter))?;
    let mut groups: Vec<(Value, Value, Vec<Value>)> = Vec::new();
    for (folded, key, item) in keyed {
        match groups.last_mut() {
            Some(group) if group.0.equals(&folded, meter)? => group.2.push(item),
            _ => groups.push((folded, key, vec![item])),
        }
    }
    let groups = groups.into_iter().map(|(_, key, items)| {
        Value::seq(meter, SeqKind::Group, vec![key, Value::list(meter, items)?])
    });
    Value::list(meter, groups.collect::<Res<_>>()?)
}

fn items(value: &Value, meter: &Meter) -> Res<Value> {
    let pairs = match value {
        Value::Undefined(_) => Vec::new(),
        Value::Dict(dict) => {
            let pairs = dict.entries.iter();
            pairs
                .map(|(key, value)| Value::tuple(meter, vec![key.clone(), value.clone()]))
                .collect::<Res<_>>()?
        }
        _ => return fail("Can only get item pairs from a mapping."),
    };
    Value::generator(meter, pairs)
}

fn join(interp: &Interp, value: &Value, given: Given) -> Res<Value> {
    let meter = &interp.meter;
    let [separator, attribute] = given.bind("join", ["d", "attribute"])?;
    let separator: Arc<str> = match &separator {
        Some(separator) => str_of(separator, meter)?,
        None => "".into(),
    };
    let getter = Getter::new(attribute.as_ref(), None)?;
    let mut out = String::new();
    for (at, item) in value.items(meter)?.iter().enumerate() {
        let text = str_of(&getter.get(interp, item)?, meter)?;
        let between = if at > 0 { &*separator } else { "" };
        meter.bytes(between.len() + text.len())?;
        out.push_str(between);
        out.push_str(&text);
    }
    Ok(Value::str(out))
}

fn map(interp: &Interp, value: &Value, mut given: Given) -> Res<Value> {
    let meter = &interp.meter;
    let mut mapped = Vec::new();
    if given.positional.is_empty() && given.named.iter().any(|(name, _)| &**name == "attribute") {
        let [attribute, default] = given.bind("map", ["attribute", "default"])?;
        let getter = Getter::new(attribute.as_ref(), default)?;
        for item in items_of(value, meter)? {
            mapped.push(getter.get(interp, &item)?);
        }
        return Value::generator(meter, mapped);
    }
    if given.positional.is_empty() {
        return fail("map requires a filter argument");
    }
    let name = need_str(Some(&given.positional.remove(0)), "map")?;
    for item in items_of(value, meter)? {
        mapped.push(meter.nested(|| filters::apply(interp, &name, item, given.clone()))?);
    }
    Value::generator(meter, mapped)
}

fn extreme(interp: &Interp, value: &Value, given: Given, name: &str) -> Res<Value> {
    let meter = &interp.meter;
    let [case, attribute] = given.bind(name, ["case_sensitive", "attribute"])?;
    let getter = Getter::new(attribute.as_ref(), None)?;
    let wanted = if name == "max" {
        Ordering::Greater
    } else {
        Ordering::Less
    };
    let mut best: Option<(Value, Value)> = None;
    for item in value.items(meter)? {
        let key = fold(getter.get(interp, &item)?, truth(case.as_ref()), meter)?;
        let better = match &best {
            Some((held, _)) => order_keys(&key, held, meter)? == wanted,
            None => true,
        };
        if better {
            best = Some((key, item));
        }
    }
    let missing = || Value::Undefined("No aggregated item, sequence was empty.".into());
    Ok(best.map_or_else(missing, |(_, item)| item))
}

fn reverse(value: &Value, meter: &Meter) -> Res<Value> {
    if let Value::Str(text) = value {
        return Value::text(meter, text.chars().rev().collect::<String>());
    }
    let mut items = value.items(meter)?;
    items.reverse();
    match value {
        Value::Seq(seq) if seq.kind == SeqKind::Generator => Value::list(meter, items),
        _ => Value::generator(meter, items),
    }
}

/// Name and arguments of a test; without, truth.
fn chosen_test(given: &mut Given) -> Res<Option<Arc<str>>> {
    if given.positional.is_empty() {
        return Ok(None);
    }
    need_str(Some(&given.positional.remove(0)), "select").map(Some)
}

fn passes(interp: &Interp, test: Option<&str>, value: &Value, given: &Given) -> Res<bool> {
    match test {
        Some(name) => checks::check(interp, name, value, given.clone()),
        None => Ok(value.truth()),
    }
}

fn select(interp: &Interp, value: &Value, mut given: Given, wanted: bool) -> Res<Value> {
    let test = chosen_test(&mut given)?;
    let mut kept = Vec::new();
    for item in items_of(value, &interp.meter)? {
        if passes(interp, test.as_deref(), &item, &given)? == wanted {
            kept.push(item);
        }
    }
    Value::generator(&interp.meter, kept)
}

fn select_attr(interp: &Interp, value: &Value, mut given: Given, wanted: bool) -> Res<Value> {
    if given.positional.is_empty() {
        return fail("Missing parameter for attribute name");
    }
    let attribute = given.positional.remove(0);
    let getter = Getter::new(Some(&attribute), None)?;
    let test = chosen_test(&mut given)?;
    let mut kept = Vec::new();
    for item in items_of(value, &interp.meter)? {
        let attribute = getter.get(interp, &item)?;
        if passes(interp, test.as_deref(), &attribute, &given)? == wanted {
            kept.push(item);
        }
    }
    Value::generator(&interp.meter, kept)
}

fn sort(interp: &Interp, value: &Value, given: Given) -> Res<Value> {
    let meter = &interp.meter;
    let [reverse, case, attribute] =
        given.bind("sort", ["reverse", "case_sensitive", "attribute"])?;
    let getters: Vec<Getter> = match &attribute {
        Some(Value::Str(paths)) => paths
            .split(',')
            .map(|path| Getter::new(Some(&Value::str(path)), None))
            .collect::<Res<_>>()?,
        other => vec![Getter::new(other.as_ref(), None)?],
    };
    let mut keyed = Vec::new();
    for item in value.items(meter)? {
        let mut keys = Vec::new();
        for getter in &getters {
            keys.push(fold(
                getter.get(interp, &item)?,
                truth(case.as_ref()),
                meter,
            )?);
        }
        keyed.push((keys, item));
    }
    order(&mut keyed, truth(reverse.as_ref()), |a, b| {
        for (a, b) in a.0.iter().zip(&b.0) {
            // As lists of keys are compared: the first that differ decide.
            if !a.equals(b, meter)? {
                return order_keys(a, b, meter);
            }
        }
        Ok(Ordering::Equal)
    })?;
    Value::list(meter, keyed.into_iter().map(|(_, item)| item).collect())
}

fn sum(interp: &Interp, value: &Value, given: Given) -> Res<Value> {
    let [attribute, start] = given.bind("sum", ["attribute", "start"])?;
    let getter = Getter::new(attribute.as_ref(), None)?;
    let mut total = start.unwrap_or(Value::Int(0));
    for item in value.items(&interp.meter)? {
        let item = getter.get(interp, &item)?;
        total = ops::binary(Binary::Add, &total, &item, &interp.meter)?;
    }
    Ok(total)
}

fn unique(interp: &Interp, value: &Value, given: Given) -> Res<Value> {
    let meter = &interp.meter;
    let [case, attribute] = given.bind("unique", ["case_sensitive", "attribute"])?;
    let getter = Getter::new(attribute.as_ref(), None)?;
    let mut seen = super::value::Dict::default();
    let mut kept = Vec::new();
    for item in value.items(meter)? {
        let key = fold(getter.get(interp, &item)?, truth(case.as_ref()), meter)?;
        if seen.get(&key).is_none() {
            seen.insert(meter, key, Value::None)?;
            kept.push(item);
        }
    }
    Value::generator(meter, kept)
}
