//! What a template computes with: Python's values, as far as templates see them.

use super::ast::{For, Macro};
use super::meter::{Fault, MAX_VALUE_DEPTH, Meter, Res, fail};
use std::cell::{Cell, RefCell};
use std::cmp::Ordering;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

/// A value.
#[derive(Clone, Debug)]
pub(super) enum Value {
    /// A name or item that is not there; most uses fail with this message.
    Undefined(Arc<str>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<str>),
    Seq(Rc<Seq>),
    Dict(Rc<Dict>),
    Namespace(Rc<RefCell<Dict>>),
    Func(Rc<Func>),
}

/// Kinds of sequence: they differ in how they print and in what can be asked of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SeqKind {
    List,
    Tuple,
    Range,
    /// Can be walked once, and has no length.
    Generator,
    Keys,
    Values,
    Items,
    /// A pair from `groupby`, with `grouper` and `list`.
    Group,
}

/// A sequence; it never changes.
#[derive(Debug)]
pub(super) struct Seq {
    pub(super) kind: SeqKind,
    pub(super) items: Vec<Value>,
    depth: u16,
    /// Items of a generator that have been taken.
    pub(super) taken: Cell<usize>,
}

/// A dictionary in order of insertion; values change only in a namespace.
#[derive(Debug, Default)]
pub(super) struct Dict {
    pub(super) entries: Vec<(Value, Value)>,
    index: HashMap<Key, usize>,
    depth: u16,
}

/// A value as a key: numbers that are equal are the same key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    None,
    Int(i128),
    Float(u64),
    Str(Arc<str>),
    Tuple(Vec<Key>),
}

/// Something that can be called.
#[derive(Debug)]
pub(super) enum Func {
    /// A function of the environment.
    Global(&'static str),
    /// A method of a value.
    Method(Value, &'static str),
    Macro(Arc<Macro>, Rc<Scope>),
    Loop(Loop),
    /// `joiner(sep)`: nothing at first, then the separator.
    Joiner(Arc<str>, Cell<bool>),
    /// `cycler(a, b, …)`.
    Cycler(Rc<Seq>, Cell<usize>),
}

/// The variable `loop`.
#[derive(Debug)]
pub(super) struct Loop {
    /// What is walked, as a sequence of its own.
    pub(super) items: Rc<Seq>,
    pub(super) index: Cell<usize>,
    /// Loops around it by recursion.
    pub(super) depth: usize,
    pub(super) node: Arc<For>,
    pub(super) scope: Rc<Scope>,
    pub(super) last_changed: RefCell<Option<Vec<Value>>>,
}

/// Names and the names around them.
#[derive(Debug, Default)]
pub(super) struct Scope {
    pub(super) names: RefCell<HashMap<Arc<str>, Value>>,
    pub(super) around: Option<Rc<Scope>>,
}

impl Scope {
    pub(super) fn within(around: &Rc<Scope>) -> Rc<Scope> {
        Rc::new(Scope {
            names: RefCell::default(),
            around: Some(around.clone()),
        })
    }

    pub(super) fn get(&self, name: &str) -> Option<Value> {
        let mut scope = Some(self);
        while let Some(at) = scope {
            if let Some(value) = at.names.borrow().get(name) {
                return Some(value.clone());
            }
            scope = at.around.as_deref();
        }
        None
    }

    pub(super) fn set(&self, name: &Arc<str>, value: Value) {
        // The old value is dropped after the borrow has ended.
        let old = self.names.borrow_mut().insert(name.clone(), value);
        drop(old);
    }
}

/// The error of any use of an undefined value.
pub(super) fn undefined<T>(message: &str) -> Res<T> {
    fail(message)
}

impl Value {
    pub(super) fn str(text: impl Into<Arc<str>>) -> Value {
        Value::Str(text.into())
    }

    /// A text that counts against the budget.
    pub(super) fn text(meter: &Meter, text: impl AsRef<str> + Into<Arc<str>>) -> Res<Value> {
        meter.bytes(text.as_ref().len())?;
        Ok(Value::Str(text.into()))
    }

    /// A sequence that counts against the budget.
    pub(super) fn seq(meter: &Meter, kind: SeqKind, items: Vec<Value>) -> Res<Value> {
        Seq::new(meter, kind, items).map(Value::Seq)
    }

    pub(super) fn list(meter: &Meter, items: Vec<Value>) -> Res<Value> {
        Self::seq(meter, SeqKind::List, items)
    }

    pub(super) fn tuple(meter: &Meter, items: Vec<Value>) -> Res<Value> {
        Self::seq(meter, SeqKind::Tuple, items)
    }

    pub(super) fn generator(meter: &Meter, items: Vec<Value>) -> Res<Value> {
        Self::seq(meter, SeqKind::Generator, items)
    }

    pub(super) fn dict(meter: &Meter, pairs: Vec<(Value, Value)>) -> Res<Value> {
        let mut dict = Dict::default();
        for (key, value) in pairs {
            dict.insert(meter, key, value)?;
        }
        Ok(Value::Dict(Rc::new(dict)))
    }

    pub(super) fn func(func: Func) -> Value {
        Value::Func(Rc::new(func))
    }

    fn depth(&self) -> u16 {
        match self {
            Value::Seq(seq) => seq.depth,
            Value::Dict(dict) => dict.depth,
            // What holds values counts as a level, or chains of them could grow without end.
            Value::Func(func) => match &**func {
                Func::Method(value, _) => value.depth(),
                Func::Loop(state) => state.items.depth,
                Func::Cycler(items, _) => items.depth,
                Func::Global(_) | Func::Macro(..) | Func::Joiner(..) => 0,
            },
            _ => 0,
        }
    }

    pub(super) fn as_str(&self) -> Option<&str> {
        match self {
            Value::Str(text) => Some(text),
            _ => None,
        }
    }

    /// The number of an integer or a bool.
    pub(super) fn as_int(&self) -> Option<i128> {
        match self {
            Value::Int(number) => Some(*number),
            Value::Bool(truth) => Some(i128::from(*truth)),
            _ => None,
        }
    }

    /// Any number.
    pub(super) fn as_float(&self) -> Option<f64> {
        match self {
            Value::Float(number) => Some(*number),
            other => other.as_int().map(|number| number as f64),
        }
    }

    pub(super) fn is_undefined(&self) -> bool {
        matches!(self, Value::Undefined(_))
    }

    /// What `if` makes of it.
    pub(super) fn truth(&self) -> bool {
        match self {
            Value::Undefined(_) | Value::None => false,
            Value::Bool(truth) => *truth,
            Value::Int(number) => *number != 0,
            Value::Float(number) => *number != 0.0,
            Value::Str(text) => !text.is_empty(),
            Value::Seq(seq) => seq.kind == SeqKind::Generator || !seq.items.is_empty(),
            Value::Dict(dict) => !dict.entries.is_empty(),
            Value::Namespace(_) | Value::Func(_) => true,
        }
    }

    /// Python's name of its type.
    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Value::Undefined(_) => "Undefined",
            Value::None => "NoneType",
            Value::Bool(_) => "bool",
            Value::Int(_) => "int",
            Value::Float(_) => "float",
            Value::Str(_) => "str",
            Value::Seq(seq) => match seq.kind {
                SeqKind::List => "list",
                SeqKind::Tuple => "tuple",
                SeqKind::Range => "range",
                SeqKind::Generator => "generator",
                SeqKind::Keys => "dict_keys",
                SeqKind::Values => "dict_values",
                SeqKind::Items => "dict_items",
                SeqKind::Group => "_GroupTuple",
            },
            Value::Dict(_) => "dict",
            Value::Namespace(_) => "TemplateNamespace",
            Value::Func(func) => match **func {
                Func::Global(_) => "function",
                Func::Method(..) => "builtin_function_or_method",
                Func::Macro(..) => "Macro",
                Func::Loop(_) => "LoopContext",
                Func::Joiner(..) => "Joiner",
                Func::Cycler(..) => "Cycler",
            },
        }
    }

    /// The items that walking it gives; a generator gives each only once.
    pub(super) fn items(&self, meter: &Meter) -> Res<Vec<Value>> {
        let items: Vec<Value> = match self {
            Value::Undefined(_) => Vec::new(),
            Value::Str(text) => {
                meter.bytes(text.len() * size_of::<Value>())?;
                text.chars()
                    .map(|c| Value::str(&*c.encode_utf8(&mut [0; 4])))
                    .collect()
            }
            Value::Seq(seq) => {
                meter.bytes(seq.items.len() * size_of::<Value>())?;
                let from = match seq.kind {
                    SeqKind::Generator => seq.taken.replace(seq.items.len()),
                    _ => 0,
                };
                seq.items[from.min(seq.items.len())..].to_vec()
            }
            Value::Dict(dict) => {
                meter.bytes(dict.entries.len() * size_of::<Value>())?;
                dict.entries.iter().map(|(key, _)| key.clone()).collect()
            }
            other => return fail(format!("'{}' object is not iterable", other.type_name())),
        };
        meter.step(items.len())?;
        Ok(items)
    }

    /// `len()`.
    pub(super) fn length(&self, meter: &Meter) -> Res<usize> {
        match self {
            Value::Undefined(_) => Ok(0),
            Value::Str(text) => {
                meter.step(text.len() / 64)?;
                Ok(text.chars().count())
            }
            Value::Seq(seq) if seq.kind != SeqKind::Generator => Ok(seq.items.len()),
            Value::Dict(dict) => Ok(dict.entries.len()),
            other => fail(format!(
                "object of type '{}' has no len()",
                other.type_name()
            )),
        }
    }

    /// `==`.
    pub(super) fn equals(&self, other: &Value, meter: &Meter) -> Res<bool> {
        meter.step(1)?;
        Ok(match (self, other) {
            (Value::Undefined(_), Value::Undefined(_)) | (Value::None, Value::None) => true,
            (Value::Str(a), Value::Str(b)) => {
                meter.step(a.len() / 64)?;
                a == b
            }
            (Value::Seq(a), Value::Seq(b)) => {
                if a.plain_kind() != b.plain_kind() || a.items.len() != b.items.len() {
                    return Ok(false);
                }
                for (a, b) in a.items.iter().zip(&b.items) {
                    if !a.equals(b, meter)? {
                        return Ok(false);
                    }
                }
                true
            }
            (Value::Dict(a), Value::Dict(b)) => {
                if a.entries.len() != b.entries.len() {
                    return Ok(false);
                }
                for (key, value) in &a.entries {
                    match b.get(key) {
                        Some(other) if value.equals(other, meter)? => {}
                        _ => return Ok(false),
                    }
                }
                true
            }
            (Value::Namespace(a), Value::Namespace(b)) => Rc::ptr_eq(a, b),
            (Value::Func(a), Value::Func(b)) => Rc::ptr_eq(a, b),
            (a, b) => match (a.as_int(), b.as_int()) {
                (Some(a), Some(b)) => a == b,
                _ => a.as_float().is_some() && a.as_float() == b.as_float(),
            },
        })
    }

    /// `<` and its kin.
    pub(super) fn order(&self, other: &Value, op: &str, meter: &Meter) -> Res<Option<Ordering>> {
        meter.step(1)?;
        match (self, other) {
            (Value::Undefined(message), _) | (_, Value::Undefined(message)) => undefined(message),
            (Value::Str(a), Value::Str(b)) => {
                meter.step(a.len().min(b.len()) / 64)?;
                Ok(Some(a.cmp(b)))
            }
            (Value::Seq(a), Value::Seq(b)) if a.is_ordered_with(b) => {
                for (a, b) in a.items.iter().zip(&b.items) {
                    if !a.equals(b, meter)? {
                        return a.order(b, op, meter);
                    }
                }
                Ok(Some(a.items.len().cmp(&b.items.len())))
            }
            (a, b) => match (a.as_int(), b.as_int(), a.as_float(), b.as_float()) {
                (Some(a), Some(b), ..) => Ok(Some(a.cmp(&b))),
                (_, _, Some(a), Some(b)) => Ok(a.partial_cmp(&b)),
                _ => fail(format!(
                    "'{op}' not supported between instances of '{}' and '{}'",
                    a.type_name(),
                    b.type_name()
                )),
            },
        }
    }

    fn key(&self) -> Res<Key> {
        Ok(match self {
            Value::None => Key::None,
            Value::Str(text) => Key::Str(text.clone()),
            Value::Float(number) if number.fract() == 0.0 && number.abs() < 1e18 => {
                Key::Int(*number as i128)
            }
            Value::Float(number) => Key::Float(number.to_bits()),
            Value::Seq(seq) if matches!(seq.kind, SeqKind::Tuple | SeqKind::Group) => {
                Key::Tuple(seq.items.iter().map(Value::key).collect::<Res<_>>()?)
            }
            other => match other.as_int() {
                Some(number) => Key::Int(number),
                None => return fail(format!("unhashable type: '{}'", other.type_name())),
            },
        })
    }
}

fn deeper(depth: Option<u16>) -> Res<u16> {
    match depth.unwrap_or(0) {
        depth if depth < MAX_VALUE_DEPTH => Ok(depth + 1),
        _ => Err(Fault::Exhausted {
            what: "recursion",
            limit: u64::from(MAX_VALUE_DEPTH),
        }),
    }
}

impl Seq {
    /// A sequence that counts against the budget.
    pub(super) fn new(meter: &Meter, kind: SeqKind, items: Vec<Value>) -> Res<Rc<Self>> {
        meter.bytes(items.len() * size_of::<Value>() + 64)?;
        meter.step(items.len())?;
        let depth = deeper(items.iter().map(Value::depth).max())?;
        Ok(Rc::new(Seq {
            kind,
            items,
            depth,
            taken: Cell::new(0),
        }))
    }

    /// The kind that equality goes by.
    fn plain_kind(&self) -> SeqKind {
        match self.kind {
            SeqKind::Group => SeqKind::Tuple,
            kind => kind,
        }
    }

    fn is_ordered_with(&self, other: &Seq) -> bool {
        let kind = self.plain_kind();
        kind == other.plain_kind() && matches!(kind, SeqKind::List | SeqKind::Tuple)
    }
}

impl Dict {
    /// The value of a key; nothing for what cannot be a key.
    pub(super) fn get(&self, key: &Value) -> Option<&Value> {
        let at = *self.index.get(&key.key().ok()?)?;
        self.entries.get(at).map(|(_, value)| value)
    }

    pub(super) fn get_str(&self, key: &str) -> Option<&Value> {
        self.get(&Value::str(key))
    }

    /// Sets a key, at its old place if it is there.
    pub(super) fn insert(&mut self, meter: &Meter, key: Value, value: Value) -> Res<()> {
        meter.bytes(4 * size_of::<Value>())?;
        let hashed = key.key()?;
        self.depth = self
            .depth
            .max(deeper(Some(value.depth().max(key.depth())))?);
        match self.index.get(&hashed) {
            Some(&at) => self.entries[at].1 = value,
            None => {
                self.index.insert(hashed, self.entries.len());
                self.entries.push((key, value));
            }
        }
        Ok(())
    }
}
