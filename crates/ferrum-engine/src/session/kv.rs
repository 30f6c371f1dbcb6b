//! Serialises and restores the KV cache of a [`Session`].

use super::Session;
use crate::offload::{EntryLayouts, Origin};
use ferrum_types::{Error, Result, StateSlot, TokenId};

impl Session {
    /// Key of this session's keys, values and recurrent states, for a model of this identity: everything that they depend
    /// on besides the tokens. Sessions with an equal key can use them. `None` if they cannot be read and written.
    pub fn kv_key(&self, model: &str) -> Option<String> {
        let layouts = EntryLayouts::of(self.runner())?;
        let origins = layouts.origins(model, &self.placement());
        let texts: Vec<_> = origins
            .into_iter()
            .map(|Origin { text, .. }| text)
            .collect();
        Some(texts.join("\n"))
    }

    /// Bytes of the cache after `tokens` tokens: the blocks of each cache group that the next token reads, and the
    /// recurrent states. `None` if they cannot be read and written.
    pub fn kv_bytes(&self, tokens: usize) -> Option<usize> {
        let layouts = EntryLayouts::of(self.runner())?;
        let mut bytes = layouts.state.map_or(0, |layout| layout.bytes);
        for (layout, table) in layouts.groups.iter().zip(self.tables()) {
            let blocks = table.needed(tokens).len();
            bytes = bytes.checked_add(blocks.checked_mul(layout.bytes)?)?;
        }
        Some(bytes)
    }

    /// Reads the cache after all its tokens: the needed blocks of each group, in order, then the states.
    ///
    /// # Errors
    /// Those of [`StepRunner::read_kv_blocks`](crate::StepRunner::read_kv_blocks) and
    /// [`StepRunner::read_state`](crate::StepRunner::read_state).
    pub fn read_kv(&mut self) -> Result<Vec<u8>> {
        let bytes = self.kv_bytes(self.len()).ok_or_else(no_blocks)?;
        let layouts = EntryLayouts::of(self.runner()).ok_or_else(no_blocks)?;
        let mut out = vec![0; bytes];
        let mut rest = &mut out[..];
        for (group, layout) in layouts.groups.iter().enumerate() {
            let blocks = self.needed_blocks(group, self.len());
            let (own, after) = rest.split_at_mut(blocks.len() * layout.bytes);
            self.runner_mut().read_kv_blocks(group, &blocks, own)?;
            rest = after;
        }
        if layouts.state.is_some() {
            self.runner_mut().read_state(StateSlot(0), rest)?;
        }
        Ok(out)
    }

    /// Replaces the cache by the one after `tokens`, which [`read_kv`](Self::read_kv) read under the same
    /// [`kv_key`](Self::kv_key).
    ///
    /// # Errors
    /// [`Error::ContextOverflow`] for more tokens than there is room for; `Shape` for bytes of another length; those of
    /// [`StepRunner::write_kv_blocks`](crate::StepRunner::write_kv_blocks) and
    /// [`StepRunner::write_state`](crate::StepRunner::write_state). The cache is empty then.
    pub fn write_kv(&mut self, tokens: &[TokenId], bytes: &[u8]) -> Result<()> {
        self.set_cached(&[]);
        let (requested, capacity) = (tokens.len(), self.capacity());
        if requested > capacity {
            return Err(Error::ContextOverflow {
                requested,
                capacity,
            });
        }
        let expected = self.kv_bytes(requested).ok_or_else(no_blocks)?;
        if bytes.len() != expected {
            return Err(Error::Shape {
                op: "session",
                what: "bytes of the cache",
                found: bytes.len(),
                expected,
            });
        }
        let layouts = EntryLayouts::of(self.runner()).ok_or_else(no_blocks)?;
        let mut rest = bytes;
        for (group, layout) in layouts.groups.iter().enumerate() {
            let blocks = self.needed_blocks(group, requested);
            let (own, after) = rest.split_at(blocks.len() * layout.bytes);
            self.runner_mut().write_kv_blocks(group, &blocks, own)?;
            rest = after;
        }
        if layouts.state.is_some() {
            self.runner_mut().write_state(StateSlot(0), rest)?;
        }
        self.set_cached(tokens);
        Ok(())
    }
}

fn no_blocks() -> Error {
    Error::invalid("session", "this backend's keys and values cannot be kept")
}
