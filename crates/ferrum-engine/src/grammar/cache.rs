//! Grammars that were compiled lately: a conversation brings the same tools and the same schema with every turn.
//!
//! A constraint is at its beginning and is never changed, as each answer works on a clone of its own; so
//! whether it was found here or compiled makes no difference to an answer.

use super::{Constraint, Grammar};
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Memory that a compiled grammar is taken to have, beside what grows with its text: lexer and parser of a
/// small one.
const BYTES_PER_GRAMMAR: usize = 256 << 10;
/// The same for each byte of its text.
const BYTES_PER_BYTE: usize = 32;

/// Least recently used grammars leave it first.
#[derive(Debug)]
pub(super) struct GrammarCache {
    entries: Mutex<VecDeque<Entry>>,
    max_bytes: usize,
}

#[derive(Debug)]
struct Entry {
    /// The grammar, written out.
    key: String,
    constraint: Constraint,
}

impl Entry {
    /// An estimate: the compiler does not say.
    fn bytes(&self) -> usize {
        BYTES_PER_GRAMMAR + self.key.len() * BYTES_PER_BYTE
    }
}

impl GrammarCache {
    /// A cache of grammars that take about `max_bytes` together.
    pub(super) fn new(max_bytes: usize) -> Self {
        Self {
            entries: Mutex::default(),
            max_bytes,
        }
    }

    /// The constraint of a grammar: the one that is here, or else the one that `compile` makes, which
    /// others do not wait for. Faults are not kept.
    pub(super) fn get_or_compile<E>(
        &self,
        grammar: &Grammar,
        compile: impl FnOnce() -> Result<Constraint, E>,
    ) -> Result<Constraint, E> {
        // Quotes and escapes what is in it, and keeps the order of a schema's properties, which counts.
        let key = format!("{grammar:?}");
        if let Some(found) = self.take(&key) {
            let constraint = found.constraint.clone();
            self.put(found);
            return Ok(constraint);
        }
        let constraint = compile()?;
        self.put(Entry {
            key,
            constraint: constraint.clone(),
        });
        Ok(constraint)
    }

    fn take(&self, key: &str) -> Option<Entry> {
        let mut entries = self.entries();
        let at = entries.iter().position(|entry| entry.key == key)?;
        entries.remove(at)
    }

    /// As the most recent one.
    fn put(&self, entry: Entry) {
        if entry.bytes() > self.max_bytes {
            return;
        }
        let mut entries = self.entries();
        // Two may have compiled it at a time.
        entries.retain(|other| other.key != entry.key);
        entries.push_front(entry);
        let mut bytes = 0;
        let fits = entries.iter().take_while(|entry| {
            bytes += entry.bytes();
            bytes <= self.max_bytes
        });
        let kept = fits.count();
        entries.truncate(kept);
    }

    fn entries(&self) -> MutexGuard<'_, VecDeque<Entry>> {
        // Nothing panics while it holds the lock.
        let entries = self.entries.lock();
        entries.unwrap_or_else(PoisonError::into_inner)
    }
}
