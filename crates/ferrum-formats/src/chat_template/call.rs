//! Arguments of calls, given to parameters by place or name as Python does.

use super::meter::{Res, fail};
use super::value::Value;
use std::sync::Arc;

/// Evaluated arguments.
#[derive(Clone, Debug, Default)]
pub(super) struct Given {
    pub(super) positional: Vec<Value>,
    pub(super) named: Vec<(Arc<str>, Value)>,
}

impl Given {
    /// The arguments in the order of the parameters' names.
    pub(super) fn bind<const N: usize>(
        self,
        function: &str,
        names: [&str; N],
    ) -> Res<[Option<Value>; N]> {
        let mut bound: [Option<Value>; N] = std::array::from_fn(|_| None);
        if self.positional.len() > N {
            return fail(format!(
                "{function}() takes at most {N} arguments ({} given)",
                self.positional.len()
            ));
        }
        for (slot, value) in bound.iter_mut().zip(self.positional) {
            *slot = Some(value);
        }
        for (name, value) in self.named {
            match names.iter().position(|known| **known == *name) {
                Some(at) if bound[at].is_none() => bound[at] = Some(value),
                Some(_) => {
                    return fail(format!(
                        "{function}() got multiple values for argument '{name}'"
                    ));
                }
                None => {
                    return fail(format!(
                        "{function}() got an unexpected keyword argument '{name}'"
                    ));
                }
            }
        }
        Ok(bound)
    }

    /// Fails when there are any.
    pub(super) fn none(self, function: &str) -> Res<()> {
        self.bind::<0>(function, []).map(|_| ())
    }
}

/// An integer argument; `None` and a missing one give the default.
pub(super) fn int_or(value: Option<&Value>, default: i128) -> Res<i128> {
    match value {
        None | Some(Value::None) => Ok(default),
        Some(value) => match value.as_int() {
            Some(number) => Ok(number),
            None => fail(format!(
                "'{}' object cannot be interpreted as an integer",
                value.type_name()
            )),
        },
    }
}

/// A string argument that must be there.
pub(super) fn need_str(value: Option<&Value>, function: &str) -> Res<Arc<str>> {
    match value {
        Some(Value::Str(text)) => Ok(text.clone()),
        Some(other) => fail(format!(
            "{function}() argument must be str, not {}",
            other.type_name()
        )),
        None => fail(format!("{function}() is missing an argument")),
    }
}

/// Whether an argument is true; missing is false.
pub(super) fn truth(value: Option<&Value>) -> bool {
    value.is_some_and(Value::truth)
}
