//! Closes JSON schemas: objects that list properties get no others, unbounded integers are limited to ±2^53-1.
//!
//! JSON Schema allows further keys unless `additionalProperties` forbids them, and a model that may invent keys does.
//! Integers within ±(2^53-1) are those that every JSON reader keeps exactly (RFC 8259, section 6); small models write
//! digits without end otherwise.

use ferrum_engine::grammar::Grammar;
use serde_json::{Map, Value};
use std::borrow::Cow;

/// Keywords that say which further keys there are, or where else to look for that.
const OPEN: [&str; 9] = [
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "propertyNames",
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
    "if",
];

/// The largest integer that every reader of JSON keeps exactly.
const LARGEST: i64 = (1 << 53) - 1;

/// The same grammar where listed properties are all that there are, and integers have bounds.
pub(super) fn close_schemas(grammar: &Grammar) -> Cow<'_, Grammar> {
    match grammar {
        Grammar::JsonSchema { schema, lenient } => {
            let mut schema = schema.clone();
            close(&mut schema);
            Cow::Owned(Grammar::JsonSchema {
                schema,
                lenient: *lenient,
            })
        }
        Grammar::Lark { text, parts } => {
            let parts = parts.iter();
            let close =
                |(name, part): &(String, Grammar)| (name.clone(), close_schemas(part).into_owned());
            Cow::Owned(Grammar::Lark {
                text: text.clone(),
                parts: parts.map(close).collect(),
            })
        }
        other => Cow::Borrowed(other),
    }
}

/// Schemas are nested no deeper than their parser allowed.
fn close(schema: &mut Value) {
    let Value::Object(map) = schema else {
        return;
    };
    let lists = map.get("properties").is_some_and(Value::is_object);
    if lists && !OPEN.iter().any(|keyword| map.contains_key(*keyword)) {
        map.insert("additionalProperties".into(), false.into());
    }
    bound_integers(map);
    for (keyword, value) in map.iter_mut() {
        match keyword.as_str() {
            "properties" | "$defs" | "definitions" | "patternProperties" => {
                if let Value::Object(named) = value {
                    close_values(named);
                }
            }
            "items" | "additionalProperties" => close(value),
            "prefixItems" => value.as_array_mut().into_iter().flatten().for_each(close),
            // Alternatives to be combined with properties beside them would contradict these.
            "anyOf" | "oneOf" if !lists => {
                value.as_array_mut().into_iter().flatten().for_each(close);
            }
            _ => {}
        }
    }
}

fn bound_integers(map: &mut Map<String, Value>) {
    let is = |kind: &str| match map.get("type") {
        Some(Value::Array(kinds)) => kinds.iter().any(|one| one == kind),
        Some(one) => one == kind,
        None => false,
    };
    let listed = map.contains_key("enum") || map.contains_key("const");
    if listed || !is("integer") || is("number") {
        return;
    }
    for (bound, open, limit) in [
        ("minimum", "exclusiveMinimum", -LARGEST),
        ("maximum", "exclusiveMaximum", LARGEST),
    ] {
        if !map.contains_key(bound) && !map.contains_key(open) {
            map.insert(bound.into(), limit.into());
        }
    }
}

fn close_values(named: &mut Map<String, Value>) {
    named.values_mut().for_each(close);
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn objects_have_no_other_properties_and_integers_have_bounds() {
        let a = || json!({"type": "object", "properties": {"a": {}}});
        let only_a =
            || json!({"type": "object", "properties": {"a": {}}, "additionalProperties": false});
        let open =
            || json!({"type": "object", "properties": {"a": {}}, "additionalProperties": true});
        for (schema, expected) in [
            (a(), only_a()),
            (open(), open()),
            (json!({"type": "object"}), json!({"type": "object"})),
            (json!({"items": a()}), json!({"items": only_a()})),
            (
                json!({"anyOf": [a(), {}]}),
                json!({"anyOf": [only_a(), {}]}),
            ),
            (
                json!({"$defs": {"x": a()}, "$ref": "#/$defs/x"}),
                json!({"$defs": {"x": only_a()}, "$ref": "#/$defs/x"}),
            ),
            // Combined schemas would contradict one another.
            (json!({"allOf": [a(), a()]}), json!({"allOf": [a(), a()]})),
            (
                json!({"properties": {"b": {}}, "anyOf": [a()]}),
                json!({"properties": {"b": {}}, "anyOf": [a()]}),
            ),
            // A property may have the name of a keyword, and values are none.
            (
                json!({"properties": {"properties": a()}, "additionalProperties": true}),
                json!({"properties": {"properties": only_a()}, "additionalProperties": true}),
            ),
            (json!({"enum": [a()]}), json!({"enum": [a()]})),
            (
                json!({"type": ["integer", "null"], "minimum": 3}),
                json!({"type": ["integer", "null"], "minimum": 3, "maximum": LARGEST}),
            ),
            (
                json!({"items": {"type": "integer", "exclusiveMaximum": 9}}),
                json!({"items": {"type": "integer", "exclusiveMaximum": 9, "minimum": -LARGEST}}),
            ),
            (json!({"type": "number"}), json!({"type": "number"})),
            (
                json!({"type": "integer", "enum": [1]}),
                json!({"type": "integer", "enum": [1]}),
            ),
        ] {
            let mut found = schema.clone();
            close(&mut found);
            assert_eq!(found, expected, "{schema}");
        }
    }
}
