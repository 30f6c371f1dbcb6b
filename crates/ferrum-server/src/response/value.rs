//! Values of which answers are made.

use serde::{Serialize, Serializer};
use std::borrow::Cow;
use utoipa::openapi::schema::{ArrayBuilder, ObjectBuilder, SchemaType, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

/// Of a string that is always the same.
pub(super) fn text_schema(text: &str) -> RefOr<Schema> {
    let string = ObjectBuilder::new().schema_type(SchemaType::new(Type::String));
    string.enum_values(Some([text])).into()
}

/// A field that is always null.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Null;

impl Serialize for Null {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_unit()
    }
}

impl PartialSchema for Null {
    fn schema() -> RefOr<Schema> {
        let null = ObjectBuilder::new().schema_type(SchemaType::new(Type::Null));
        null.into()
    }
}

impl ToSchema for Null {}

/// A list that is always empty.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EmptyList;

impl Serialize for EmptyList {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq([(); 0])
    }
}

impl PartialSchema for EmptyList {
    fn schema() -> RefOr<Schema> {
        ArrayBuilder::new().max_items(Some(0)).into()
    }
}

impl ToSchema for EmptyList {}

/// An object whose names are tokens or words of a model, in an order that means something. A name is there once.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entries<V>(Vec<(String, V)>);

impl<V> Default for Entries<V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<V> Entries<V> {
    /// Adds a name that is not there yet.
    pub(crate) fn add(&mut self, name: String, value: V) {
        if self.0.iter().all(|(known, _)| *known != name) {
            self.0.push((name, value));
        }
    }
}

impl<V: Serialize> Serialize for Entries<V> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

impl<V: ToSchema> PartialSchema for Entries<V> {
    fn schema() -> RefOr<Schema> {
        let object = ObjectBuilder::new().schema_type(SchemaType::new(Type::Object));
        object.additional_properties(Some(V::schema())).into()
    }
}

impl<V: ToSchema> ToSchema for Entries<V> {
    fn name() -> Cow<'static, str> {
        Cow::Owned(format!("Entries.{}", V::name()))
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        V::schemas(schemas);
    }
}
