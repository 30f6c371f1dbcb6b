//! Functions that may be called, as a request names them.
//!
//! Readers of arguments ask for the types in a schema, grammars hold arguments to it.

use ferrum_engine::grammar::Grammar;
use serde_json::Value;

/// A function as a tool.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Function {
    /// Its place among the tools of the request.
    pub(crate) index: usize,
    pub(crate) name: String,
    /// The schema of its arguments.
    pub(crate) parameters: Value,
    /// Whether what the schema says has to be enforceable, and is enforced wherever it is called.
    pub(crate) strict: bool,
}

impl Function {
    /// What its arguments have to be. Without a need to call, only those of a strict function are held to
    /// their schema.
    pub(crate) fn arguments(&self, must_call: bool) -> Grammar {
        if !must_call && !self.strict {
            return Grammar::json_object();
        }
        let mut schema = self.parameters.clone();
        let says = |key: &str| schema.get(key).is_some();
        // Arguments are an object, whether the schema says so or not.
        if !["type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"]
            .into_iter()
            .any(says)
            && let Value::Object(map) = &mut schema
        {
            map.insert("type".into(), "object".into());
        }
        Grammar::JsonSchema {
            schema,
            lenient: !self.strict,
        }
    }
}
