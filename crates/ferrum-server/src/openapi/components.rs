//! The schemas that the document refers to by their names: those of the types that requests are read as and answers
//! are made of, with whatever these are made of.

use serde_json::{Map, Value, json};
use utoipa::ToSchema;
use utoipa::openapi::{RefOr, Schema};

/// What was referred to so far.
#[derive(Default)]
pub(super) struct Components(Vec<(String, RefOr<Schema>)>);

impl Components {
    /// The schema of a type, by its name.
    pub(super) fn of<T: ToSchema>(&mut self) -> Value {
        self.add::<T>();
        json!({"$ref": format!("#/components/schemas/{}", T::name())})
    }

    /// Has a type among the schemas.
    pub(super) fn add<T: ToSchema>(&mut self) {
        self.0.push((T::name().into_owned(), T::schema()));
        T::schemas(&mut self.0);
    }

    /// Names with their schemas; a name is there as often as it was referred to.
    pub(super) fn named(self) -> impl Iterator<Item = (String, Value)> {
        let value = |(name, schema)| (name, serde_json::to_value(schema).unwrap_or_default());
        self.0.into_iter().map(value)
    }

    /// All schemas by their names.
    pub(super) fn schemas(self) -> Map<String, Value> {
        self.named().collect()
    }
}

/// A value that is of several types at once: a request of several parts.
macro_rules! all_of {
    ($components:expr; $($part:ty),*) => {
        serde_json::json!({"allOf": [$($components.of::<$part>()),*]})
    };
}

/// A value that is of one of several types.
macro_rules! any_of {
    ($components:expr; $($form:ty),*) => {
        serde_json::json!({"anyOf": [$($components.of::<$form>()),*]})
    };
}

pub(super) use {all_of, any_of};
