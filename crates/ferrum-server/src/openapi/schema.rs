//! Words for schemas. All fields of requests may be null, which is as good as absent.

use serde_json::{Map, Value, json};
use std::ops::RangeInclusive;

pub(super) fn text() -> Value {
    json!({"type": "string"})
}

pub(super) fn boolean() -> Value {
    json!({"type": "boolean"})
}

pub(super) fn int(range: RangeInclusive<i64>) -> Value {
    let mut schema = json!({"type": "integer", "minimum": range.start()});
    if *range.end() < i64::MAX {
        schema["maximum"] = (*range.end()).into();
    }
    schema
}

pub(super) fn count(range: RangeInclusive<usize>) -> Value {
    let bound = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
    int(bound(*range.start())..=bound(*range.end()))
}

pub(super) fn number(low: f64, high: Option<f64>) -> Value {
    let mut schema = json!({"type": "number", "minimum": low});
    if let Some(high) = high {
        schema["maximum"] = high.into();
    }
    schema
}

/// Above 0.
pub(super) fn positive(high: Option<f64>) -> Value {
    let mut schema = json!({"type": "number", "exclusiveMinimum": 0});
    if let Some(high) = high {
        schema["maximum"] = high.into();
    }
    schema
}

pub(super) fn list(items: Value, most: usize) -> Value {
    json!({"type": "array", "items": items, "maxItems": most})
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

/// An object of a request: these fields and no other.
pub(super) fn closed(required: &[&str], fields: Vec<Field>) -> Value {
    let mut properties = Map::new();
    for (name, schema) in fields {
        let schema = match required.contains(&name) {
            true => schema,
            false => or_null(schema),
        };
        properties.insert(name.into(), schema);
    }
    json!({
        "type": "object",
        "properties": properties,
        "required": required,
        // A null is as good as an absent field, whatever its name.
        "additionalProperties": {"type": "null"},
    })
}

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
