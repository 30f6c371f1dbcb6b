//! Lists, dictionaries, namespaces and cyclers of templates: they print as Python's, and know how deep and large they are.
//!
//! The engine's own containers are not used, because nothing bounds them: see `compile.rs`.

use super::budget::{MAX_VALUE_BYTES, MAX_VALUE_DEPTH, charge, exhausted, fail};
use indexmap::IndexMap;
use minijinja::value::{DynObject, Object, ObjectRepr, ValueKind};
use minijinja::{Error, State, Value};
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::sync::atomic::{self, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How deep a value is, and the bytes of all it holds, what it holds twice counted twice.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Size {
    depth: u16,
    pub(super) bytes: u64,
}

impl Size {
    pub(super) fn of(value: &Value) -> Self {
        if let Some(text) = value.as_str() {
            return Size {
                depth: 0,
                bytes: 24 + text.len() as u64,
            };
        }
        let Some(object) = value.as_object() else {
            return Size {
                depth: 0,
                bytes: 24,
            };
        };
        if let Some(list) = object.downcast_ref::<List>() {
            list.size
        } else if let Some(dict) = object.downcast_ref::<Dict>() {
            dict.size
        } else if let Some(method) = object.downcast_ref::<BoundMethod>() {
            method.size
        } else if let Some(cycler) = object.downcast_ref::<Cycler>() {
            cycler.items.size
        } else if value.is_kwargs() {
            let values = value
                .try_iter()
                .into_iter()
                .flatten()
                .filter_map(|name| value.get_item(&name).ok());
            let bytes = values.fold(64, |bytes: u64, value| {
                bytes.saturating_add(Size::of(&value).bytes)
            });
            Size { depth: 0, bytes }
        } else {
            // Namespaces, functions and macros: what they hold is not walked through.
            Size {
                depth: 0,
                bytes: 64,
            }
        }
    }

    /// The size of a container that holds these.
    pub(super) fn of_container<'a>(values: impl Iterator<Item = &'a Value>) -> Result<Self, Error> {
        let mut whole = Size {
            depth: 0,
            bytes: 96,
        };
        for value in values {
            let size = Size::of(value);
            whole.depth = whole.depth.max(size.depth);
            whole.bytes = whole.bytes.saturating_add(size.bytes);
        }
        whole.depth += 1;
        if whole.depth > MAX_VALUE_DEPTH {
            return Err(exhausted("recursion", MAX_VALUE_DEPTH.into()));
        }
        if whole.bytes > MAX_VALUE_BYTES {
            return Err(exhausted("memory", MAX_VALUE_BYTES));
        }
        Ok(whole)
    }
}

/// A list or tuple; it never changes.
#[derive(Debug)]
pub(super) struct List {
    pub(super) items: Vec<Value>,
    pub(super) tuple: bool,
    /// A pair from `groupby`, with the attributes `grouper` and `list`.
    pub(super) group: bool,
    size: Size,
}

impl List {
    pub(super) fn new(items: Vec<Value>, tuple: bool) -> Result<Self, Error> {
        let size = Size::of_container(items.iter())?;
        Ok(List {
            items,
            tuple,
            group: false,
            size,
        })
    }

    /// A pair from `groupby`.
    pub(super) fn group(state: &State, key: Value, items: Value) -> Result<Value, Error> {
        charge(state, 144)?;
        Ok(Value::from_object(List {
            group: true,
            ..List::new(vec![key, items], true)?
        }))
    }

    pub(super) fn value(items: Vec<Value>, tuple: bool) -> Result<Value, Error> {
        Ok(Value::from_object(List::new(items, tuple)?))
    }

    /// A list whose memory is charged to the render budget.
    pub(super) fn charged(state: &State, items: Vec<Value>, tuple: bool) -> Result<Value, Error> {
        charge(state, 96 + 24 * items.len() as u64)?;
        List::value(items, tuple)
    }
}

/// A dictionary in order of insertion; it never changes.
#[derive(Debug, Default)]
pub(super) struct Dict {
    pub(super) items: IndexMap<Value, Value>,
    size: Size,
}

impl Dict {
    pub(super) fn new(pairs: impl IntoIterator<Item = (Value, Value)>) -> Result<Self, Error> {
        let mut items = IndexMap::new();
        for (key, value) in pairs {
            if key.as_object().is_some() {
                return fail(format!("unhashable type: '{}'", type_name(&key)));
            }
            items.insert(key, value);
        }
        let mut size = Size::of_container(items.keys().chain(items.values()))?;
        size.bytes += 32 * items.len() as u64;
        Ok(Dict { items, size })
    }

    pub(super) fn value(pairs: impl IntoIterator<Item = (Value, Value)>) -> Result<Value, Error> {
        Ok(Value::from_object(Dict::new(pairs)?))
    }

    /// A dictionary whose memory is charged to the render budget.
    pub(super) fn charged(state: &State, pairs: Vec<(Value, Value)>) -> Result<Value, Error> {
        charge(state, 160 + 80 * pairs.len() as u64)?;
        Dict::value(pairs)
    }
}

/// What `namespace` makes: the one thing that changes, so one that may hold itself.
#[derive(Debug, Default)]
pub(super) struct Namespace {
    fields: Mutex<BTreeMap<Arc<str>, Value>>,
}

impl Namespace {
    fn fields(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, Value>> {
        self.fields.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set(&self, name: &str, value: Value) -> Result<(), Error> {
        if name.starts_with('_') {
            return fail(format!(
                "a namespace cannot have the attribute '{name}': names with an underscore are not for templates"
            ));
        }
        // The old value is dropped after the lock is.
        let old = self.fields().insert(name.into(), value);
        drop(old);
        Ok(())
    }

    pub(super) fn clear(&self) {
        let fields = std::mem::take(&mut *self.fields());
        drop(fields);
    }
}

impl Object for Namespace {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.fields().get(key.as_str()?).cloned()
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }

    fn custom_cmp(self: &Arc<Self>, other: &DynObject) -> Option<Ordering> {
        let other: *const Namespace = other.downcast_ref()?;
        Some(Arc::as_ptr(self).cmp(&other))
    }

    fn call_method(
        self: &Arc<Self>,
        state: &mut State,
        name: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        let function = self.get_value(&name.into()).unwrap_or_default();
        function.call(state, args)
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("<Namespace>")
    }
}

/// `cycler(a, b, …)`, and `joiner`, which stays at its last item.
#[derive(Debug)]
pub(super) struct Cycler {
    items: List,
    joiner: bool,
    at: AtomicUsize,
}

impl Cycler {
    pub(super) fn new(items: List, joiner: bool) -> Self {
        Self {
            items,
            joiner,
            at: AtomicUsize::new(0),
        }
    }

    fn next(&self) -> Value {
        let (at, items) = (
            self.at.fetch_add(1, atomic::Ordering::Relaxed),
            &self.items.items,
        );
        let at = if self.joiner {
            at.min(1)
        } else {
            at % items.len().max(1)
        };
        items.get(at).cloned().unwrap_or_default()
    }
}

impl Object for Cycler {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _: &mut State, _: &[Value]) -> Result<Value, Error> {
        match self.joiner {
            true => Ok(self.next()),
            false => fail("a cycler is not called; its method next() is"),
        }
    }

    fn call_method(
        self: &Arc<Self>,
        _: &mut State,
        name: &str,
        _: &[Value],
    ) -> Result<Value, Error> {
        match name {
            "next" if !self.joiner => Ok(self.next()),
            _ => fail(format!("a cycler or joiner has no method '{name}'")),
        }
    }

    fn render(self: &Arc<Self>, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.joiner { "<Joiner>" } else { "<Cycler>" })
    }
}

/// A method with the value that it belongs to, not yet called.
#[derive(Debug)]
pub(super) struct BoundMethod {
    pub(super) value: Value,
    pub(super) name: String,
    size: Size,
}

impl BoundMethod {
    pub(super) fn value(value: Value, name: &str) -> Result<Value, Error> {
        let size = Size::of_container(std::iter::once(&value))?;
        Ok(Value::from_object(BoundMethod {
            value,
            name: name.into(),
            size,
        }))
    }
}

impl Object for BoundMethod {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, state: &mut State, args: &[Value]) -> Result<Value, Error> {
        self.value.call_method(state, &self.name, args)
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<method {}>", self.name)
    }
}

/// Whether a value is one of the engine's containers, or made as it is walked.
fn is_foreign(object: &DynObject) -> bool {
    object.repr() != ObjectRepr::Plain
        && !object.is::<List>()
        && !object.is::<Dict>()
        && !object.type_name().ends_with("::Macro")
}

/// Converts a result of the engine's own filters into our lists and dictionaries, whose sizes are bounded, and charges
/// their memory to the render budget.
pub(super) fn into_bounded(state: &State, value: Value) -> Result<Value, Error> {
    converted(value, &|bytes| charge(state, bytes))
}

/// A constant of a program, with our lists and dictionaries.
pub(super) fn constant(value: &Value) -> Result<Value, Error> {
    converted(value.clone(), &|_| Ok(()))
}

fn converted(value: Value, pay: &dyn Fn(u64) -> Result<(), Error>) -> Result<Value, Error> {
    let object = value.as_object().filter(|object| is_foreign(object));
    let Some(object) = object.filter(|_| !value.is_kwargs()) else {
        return Ok(value);
    };
    pay(160)?;
    if object.repr() == ObjectRepr::Map {
        let mut pairs = Vec::new();
        for (key, value) in object.try_iter_pairs().into_iter().flatten() {
            pay(80)?;
            pairs.push((key, converted(value, pay)?));
        }
        return Dict::value(pairs);
    }
    let mut items = Vec::new();
    for item in value.try_iter()?.checked() {
        pay(48)?;
        items.push(converted(item?, pay)?);
    }
    List::value(items, value.is_tuple())
}

/// The items of a list.
pub(super) fn list(value: &Value) -> Option<&List> {
    value.downcast_object_ref()
}

/// The items of a dictionary.
pub(super) fn dict(value: &Value) -> Option<&Dict> {
    value.downcast_object_ref()
}

/// Python's name of a value's type.
pub(super) fn type_name(value: &Value) -> &'static str {
    match value.kind() {
        ValueKind::Undefined => "Undefined",
        ValueKind::None => "NoneType",
        ValueKind::Bool => "bool",
        ValueKind::Number if value.is_integer() => "int",
        ValueKind::Number => "float",
        ValueKind::String => "str",
        ValueKind::Seq if list(value).is_some_and(|list| list.tuple) => "tuple",
        ValueKind::Seq | ValueKind::Iterable => "list",
        ValueKind::Map => "dict",
        _ if value.downcast_object_ref::<Namespace>().is_some() => "Namespace",
        _ => "function",
    }
}

/// `str(value)`, whose memory is charged to the render budget.
pub(super) fn text_of(state: &State, value: &Value) -> Result<Arc<str>, Error> {
    if let Some(text) = value.to_str() {
        return Ok(text);
    }
    charge(state, 2 * Size::of(value).bytes)?;
    Ok(Text(value).to_string().into())
}

/// A value as `str` prints it.
pub(super) struct Text<'a>(pub(super) &'a Value);

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_str() {
            Some(text) => f.write_str(text),
            None if self.0.is_undefined() => Ok(()),
            None => repr(self.0, f),
        }
    }
}

/// A value as `repr` prints it.
pub(super) fn repr(value: &Value, out: &mut impl Write) -> fmt::Result {
    match value.kind() {
        ValueKind::Undefined => out.write_str("Undefined"),
        ValueKind::String => repr_text(value.as_str().unwrap_or_default(), out),
        ValueKind::Number if !value.is_integer() => {
            out.write_str(&float(f64::try_from(value.clone()).unwrap_or(f64::NAN)))
        }
        // `None`, `True` and integers print as Python's, and ours do by `render`.
        _ => write!(out, "{value}"),
    }
}

/// A string in quotes, single ones if that needs no escape.
fn repr_text(text: &str, out: &mut impl Write) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.write_char(quote)?;
    for c in text.chars() {
        match c {
            '\\' => out.write_str("\\\\")?,
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            c if c == quote => write!(out, "\\{c}")?,
            c if is_printable(c) => out.write_char(c)?,
            c => match u32::from(c) {
                code @ 0..=0xFF => write!(out, "\\x{code:02x}")?,
                code @ 0x100..=0xFFFF => write!(out, "\\u{code:04x}")?,
                code => write!(out, "\\U{code:08x}")?,
            },
        }
    }
    out.write_char(quote)
}

/// `str.isprintable`: Rust's `Debug` escapes the same characters, and some marks besides.
fn is_printable(c: char) -> bool {
    if c.is_ascii() {
        return !c.is_ascii_control();
    }
    // A mark is escaped only at the start of a string; it comes second here.
    c.escape_debug().len() == 1 || format!("{:?}", format!("a{c}")).chars().count() == 4
}

/// `repr` of a float: the shortest text that reads back, with an exponent from 1e16 on.
pub(super) fn float(number: f64) -> String {
    if !number.is_finite() {
        return number.to_string().to_lowercase();
    }
    let text = format!("{number:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        return format!("{number:?}");
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}
