//! Lists and dictionaries as objects of minijinja: access, methods and printing.

use super::methods;
use super::value::{Dict, List, repr};
use minijinja::value::{DynObject, Enumerator, Object, ObjectExt, ObjectRepr};
use minijinja::{Error, State, Value};
use std::cmp::Ordering;
use std::fmt::{self, Write};
use std::sync::Arc;

impl Object for List {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let at = match key.as_str() {
            Some("grouper") if self.group => 0,
            Some("list") if self.group => 1,
            _ => key.as_i64()?,
        };
        let at = if at < 0 {
            at.checked_add(self.items.len() as i64)?
        } else {
            at
        };
        self.items.get(usize::try_from(at).ok()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.items.len())
    }

    fn custom_cmp(self: &Arc<Self>, other: &DynObject) -> Option<Ordering> {
        // A list never equals a tuple; otherwise item by item.
        let other = other.downcast_ref::<List>()?;
        Some(self.tuple.cmp(&other.tuple)).filter(|order| order.is_ne())
    }

    fn call_method(
        self: &Arc<Self>,
        state: &mut State,
        name: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        methods::of_list(state, self, name, args)
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char(if self.tuple { '(' } else { '[' })?;
        for (at, item) in self.items.iter().enumerate() {
            if at > 0 {
                f.write_str(", ")?;
            }
            repr(item, f)?;
        }
        f.write_str(match self.tuple {
            true if self.items.len() == 1 => ",)",
            true => ")",
            false => "]",
        })
    }
}

impl Object for Dict {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match key.as_object() {
            Some(_) => None,
            None => self.items.get(key).cloned(),
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.mapped_enumerator(|this| Box::new(this.items.keys().cloned()))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.items.len())
    }

    fn call_method(
        self: &Arc<Self>,
        state: &mut State,
        name: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        methods::of_dict(state, self, name, args)
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('{')?;
        for (at, (key, value)) in self.items.iter().enumerate() {
            if at > 0 {
                f.write_str(", ")?;
            }
            repr(key, f)?;
            f.write_str(": ")?;
            repr(value, f)?;
        }
        f.write_char('}')
    }
}
