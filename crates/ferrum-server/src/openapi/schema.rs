//! Words for the schemas of answers.

use serde_json::{Map, Value, json};

pub(super) fn boolean() -> Value {
    json!({"type": "boolean"})
}

pub(super) fn number(low: f64, high: Option<f64>) -> Value {
    let mut schema = json!({"type": "number", "minimum": low});
    if let Some(high) = high {
        schema["maximum"] = high.into();
    }
    schema
}

/// One of these values.
pub(super) fn only(values: &[Value]) -> Value {
    json!({"enum": values})
}

/// An object with whatever fields.
pub(super) fn object() -> Value {
    json!({"type": "object"})
}

pub(super) fn any(of: Vec<Value>) -> Value {
    json!({"anyOf": of})
}

pub(super) type Field = (&'static str, Value);

/// An object of an answer: at least these fields.
pub(super) fn open(fields: Vec<Field>) -> Value {
    let required: Vec<_> = fields.iter().map(|(name, _)| *name).collect();
    let properties: Map<_, _> = fields
        .into_iter()
        .map(|(name, schema)| (name.to_owned(), schema))
        .collect();
    json!({"type": "object", "properties": properties, "required": required})
}

pub(super) fn or_null(mut schema: Value) -> Value {
    if let Some(list) = schema.get_mut("anyOf").and_then(Value::as_array_mut) {
        list.push(json!({"type": "null"}));
        return schema;
    }
    if let Some(list) = schema.get_mut("enum").and_then(Value::as_array_mut) {
        list.push(Value::Null);
        return schema;
    }
    if let Some(kind) = schema.get("type").cloned()
        && kind.is_string()
    {
        schema["type"] = json!([kind, "null"]);
    }
    schema
}
