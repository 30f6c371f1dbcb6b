//! Parts of messages: texts and images, in the form that chat templates read.

use serde_json::{Value, json};

/// Keys of a part that templates do not see: the file, and where it was in the request.
pub(super) const DATA: &str = "data";
pub(super) const FIELD: &str = "field";
pub(super) const KIND: &str = "kind";

/// An image of a message, as stored conversations keep it. `kind` is what the request calls it, `data` is its URL.
pub(crate) fn image_part(kind: &str, field: String, data: Option<String>) -> Value {
    let mut part = json!({"type": "image", KIND: kind, FIELD: field});
    if let Some(data) = data {
        part[DATA] = data.into();
    }
    part
}

/// A part of text.
pub(crate) fn text_part(text: &str) -> Value {
    json!({"type": "text", "text": text})
}
