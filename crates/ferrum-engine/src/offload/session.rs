//! The keys and values of a [`Session`] as bytes, to go on with it in another process.

use super::Group;
use crate::Session;
use ferrum_types::{BlockId, Error, Result, TokenId};

impl Session {
    /// What keys and values of this session depend on beside the tokens, for a model of this identity: others may use
    /// them where it is the same. `None` where blocks cannot be read and written.
    pub fn kv_key(&self, model: &str) -> Option<String> {
        let layout = self.runner().kv_block_layout()?;
        Some(Group::new(model, &self.placement(), layout).text)
    }

    /// Bytes that the keys and values of so many tokens take; `None` where blocks cannot be read and written.
    pub fn kv_bytes(&self, tokens: usize) -> Option<usize> {
        let layout = self.runner().kv_block_layout()?;
        let blocks = tokens.div_ceil(layout.block_size);
        blocks.checked_mul(layout.bytes)
    }

    /// The keys and values of all tokens in the cache, in whole blocks.
    ///
    /// # Errors
    /// Those of [`StepRunner::read_kv_blocks`](crate::StepRunner::read_kv_blocks).
    pub fn read_kv(&mut self) -> Result<Vec<u8>> {
        let tokens = self.len();
        let bytes = self.kv_bytes(tokens).ok_or_else(no_blocks)?;
        let blocks = self.blocks_of(tokens)?;
        let mut out = vec![0; bytes];
        self.runner_mut().read_kv_blocks(&blocks, &mut out)?;
        Ok(out)
    }

    /// Takes the keys and values of `tokens`, as [`read_kv`](Self::read_kv) gave them under the same
    /// [`kv_key`](Self::kv_key), for what the cache has.
    ///
    /// # Errors
    /// [`Error::ContextOverflow`] for more tokens than there is room for; those of
    /// [`StepRunner::write_kv_blocks`](crate::StepRunner::write_kv_blocks). The cache is empty then.
    pub fn write_kv(&mut self, tokens: &[TokenId], bytes: &[u8]) -> Result<()> {
        self.set_cached(&[]);
        let (requested, capacity) = (tokens.len(), self.capacity());
        if requested > capacity {
            return Err(Error::ContextOverflow {
                requested,
                capacity,
            });
        }
        let blocks = self.blocks_of(requested)?;
        self.runner_mut().write_kv_blocks(&blocks, bytes)?;
        self.set_cached(tokens);
        Ok(())
    }

    /// The blocks of the first tokens.
    fn blocks_of(&self, tokens: usize) -> Result<Vec<BlockId>> {
        let layout = self.runner().kv_block_layout().ok_or_else(no_blocks)?;
        let count = tokens.div_ceil(layout.block_size) as u32;
        Ok((0..count).map(BlockId).collect())
    }
}

fn no_blocks() -> Error {
    Error::invalid("session", "this backend's keys and values cannot be kept")
}
