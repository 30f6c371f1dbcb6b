//! Responses that are kept for a while, so that a later request can go on from one.
//!
//! In memory, and as JSON text, whose length says honestly how much they take: the oldest make room for
//! new ones. Any client that knows the id of a response may read it, as with OpenAI; ids are random.

use serde_json::Value;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What an entry takes beside its texts, about.
const ENTRY_BYTES: usize = 256;

/// A response and what led to it.
#[derive(Debug)]
pub(crate) struct Stored {
    model: String,
    response: String,
    messages: String,
}

impl Stored {
    /// What the request called the model.
    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    /// The response as it was given, as JSON text.
    pub(crate) fn response(&self) -> &str {
        &self.response
    }

    /// The messages of the conversation up to it, the answer the last of them. `None` when they are nested too deeply to be
    /// read again.
    pub(crate) fn messages(&self) -> Option<Vec<Value>> {
        serde_json::from_str(&self.messages).ok()
    }

    fn bytes(&self) -> usize {
        self.model.len() + self.response.len() + self.messages.len() + ENTRY_BYTES
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct ResponseStore {
    max_bytes: usize,
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    by_id: HashMap<String, Arc<Stored>>,
    /// The oldest first.
    order: VecDeque<String>,
    bytes: usize,
}

impl ResponseStore {
    pub(crate) fn new(max_bytes: usize) -> Self {
        Self {
            max_bytes,
            entries: Mutex::default(),
        }
    }

    /// Whether anything is kept at all.
    pub(crate) fn is_on(&self) -> bool {
        self.max_bytes > 0
    }

    /// Keeps a response to what the request called `model`, and the messages up to it, both as JSON text. What is larger
    /// than all that may be kept is not.
    pub(crate) fn put(&self, id: &str, model: &str, response: String, messages: String) {
        let stored = Stored {
            model: model.to_owned(),
            response,
            messages,
        };
        let bytes = stored.bytes();
        if bytes > self.max_bytes {
            return;
        }
        let mut entries = self.lock();
        while entries.bytes + bytes > self.max_bytes {
            let Some(oldest) = entries.order.pop_front() else {
                break;
            };
            entries.remove(&oldest);
        }
        entries.bytes += bytes;
        entries.order.push_back(id.to_owned());
        entries.by_id.insert(id.to_owned(), Arc::new(stored));
    }

    pub(crate) fn get(&self, id: &str) -> Option<Arc<Stored>> {
        self.lock().by_id.get(id).cloned()
    }

    /// An item of the output of a response that is kept, as JSON text. Clients rarely ask, so there is no index.
    pub(crate) fn item(&self, id: &str) -> Option<String> {
        let named = format!("\"id\":{}", Value::from(id));
        let stored = self.lock().by_id.values().cloned().collect::<Vec<_>>();
        let stored = stored
            .into_iter()
            .filter(|stored| stored.response.contains(&named));
        stored.into_iter().find_map(|stored| {
            let response: Value = serde_json::from_str(&stored.response).ok()?;
            let mut items = response["output"].as_array()?.iter();
            items.find(|item| item["id"] == id).map(Value::to_string)
        })
    }

    /// Whether it was there.
    pub(crate) fn remove(&self, id: &str) -> bool {
        let mut entries = self.lock();
        entries.order.retain(|other| other != id);
        entries.remove(id)
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        // Nothing panics between the changes of an entry.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    fn remove(&mut self, id: &str) -> bool {
        let removed = self.by_id.remove(id);
        self.bytes -= removed.as_ref().map_or(0, |stored| stored.bytes());
        removed.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_oldest_make_room() {
        let answer = "a".repeat(500);
        let store = ResponseStore::new(2000);
        let put = |id: &str, answer: &str, messages: &str| {
            store.put(id, "", answer.to_owned(), messages.to_owned());
        };
        for id in ["1", "2", "3"] {
            put(id, &answer, r#"[{"role":"user"}]"#);
        }
        assert!(store.get("1").is_none());
        let kept = store.get("3").unwrap();
        assert_eq!(kept.response(), answer);
        assert_eq!(kept.messages(), Some(vec![json!({"role": "user"})]));
        assert!(store.remove("2") && !store.remove("2"));
        put("4", &answer, "[]");
        assert!(store.get("3").is_some() && store.get("4").is_some());
        put("5", &"a".repeat(2000), "[]");
        assert!(store.get("5").is_none() && store.get("3").is_some());
        let entries = store.lock();
        let bytes: usize = entries.by_id.values().map(|stored| stored.bytes()).sum();
        assert_eq!((entries.bytes, entries.order.len()), (bytes, 2));
    }
}
