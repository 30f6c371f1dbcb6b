//! The prefix cache: which block holds the keys and values of which tokens after which tokens.
//!
//! It is a tree. A block is known by its parent (the block before it, or a root for each salt) and by
//! its own tokens, and is found by a hash of both. The hash is keyed by a secret of the process, so
//! that nobody can prepare prompts that collide; and as tokens and parent are compared too, a collision
//! would only be a miss. By induction a match means that the whole prefix is the same.

use ferrum_types::{AdapterId, BlockId, TokenId};
use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;
use std::hash::BuildHasher;
use std::sync::Arc;

/// Whatever keys and values depend on beside the tokens, and whoever may not know of each other's.
/// Only sequences with equal salts share blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct CacheSalt {
    /// Tenants do not share: the time of a hit would tell one of another's prompts.
    pub tenant: Option<Arc<str>>,
    /// Length of the prompt, for models whose keys depend on it (length-dependent RoPE).
    pub prompt_len: Option<usize>,
    /// The LoRA adapter that runs beside the weights.
    pub adapter: Option<AdapterId>,
    /// Number of a request that shares with nobody else.
    pub private: Option<u64>,
}

/// What a block continues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Parent {
    /// Nothing: it is the first of a sequence.
    Root(CacheSalt),
    /// Another block of the cache, which stays in it for longer than this one.
    Block(BlockId),
}

/// What became of a block that was to be registered.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Registered {
    /// It is in the cache now.
    New,
    /// Another block holds the same.
    Known(BlockId),
    /// Something else has its hash.
    Collision,
}

#[derive(Debug)]
pub(super) struct Entry {
    hash: u64,
    pub(super) parent: Parent,
    tokens: Box<[TokenId]>,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct PrefixCache<S> {
    hasher: S,
    by_hash: HashMap<u64, BlockId>,
    /// What each block of the pool is in the cache.
    entries: Vec<Option<Entry>>,
}

impl<S: BuildHasher> PrefixCache<S> {
    pub(super) fn new(blocks: usize, hasher: S) -> Self {
        Self {
            hasher,
            by_hash: HashMap::new(),
            entries: (0..blocks).map(|_| None).collect(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.by_hash.len()
    }

    pub(super) fn contains(&self, block: BlockId) -> bool {
        self.entries[block.0 as usize].is_some()
    }

    pub(super) fn entry(&self, block: BlockId) -> Option<&Entry> {
        self.entries[block.0 as usize].as_ref()
    }

    /// The salt and all tokens of the prefix that ends with a block of the cache.
    pub(super) fn prefix(&self, block: BlockId) -> (CacheSalt, Vec<TokenId>) {
        let (mut parts, mut at) = (Vec::new(), block);
        let salt = loop {
            let Some(entry) = self.entry(at) else {
                break CacheSalt::default();
            };
            parts.push(&*entry.tokens);
            match &entry.parent {
                Parent::Root(salt) => break salt.clone(),
                Parent::Block(before) => at = *before,
            }
        };
        parts.reverse();
        (salt, parts.concat())
    }

    /// The block that holds `tokens` after `parent`.
    pub(super) fn find(&self, parent: &Parent, tokens: &[TokenId]) -> Option<BlockId> {
        let found = *self.by_hash.get(&self.hash(parent, tokens))?;
        self.holds(found, parent, tokens).then_some(found)
    }

    /// Registers `block` as the holder of `tokens` after `parent`, if there is none yet.
    pub(super) fn insert(
        &mut self,
        block: BlockId,
        parent: Parent,
        tokens: &[TokenId],
    ) -> Registered {
        let hash = self.hash(&parent, tokens);
        if let Some(&found) = self.by_hash.get(&hash) {
            return if self.holds(found, &parent, tokens) {
                Registered::Known(found)
            } else {
                Registered::Collision
            };
        }
        self.by_hash.insert(hash, block);
        self.entries[block.0 as usize] = Some(Entry {
            hash,
            parent,
            tokens: tokens.into(),
        });
        Registered::New
    }

    /// Forgets a block, which no other block of the cache may continue.
    pub(super) fn remove(&mut self, block: BlockId) {
        if let Some(entry) = self.entries[block.0 as usize].take()
            && let Slot::Occupied(slot) = self.by_hash.entry(entry.hash)
            && *slot.get() == block
        {
            slot.remove();
        }
    }

    /// Whether looking for what `block` holds leads to it.
    pub(super) fn finds_itself(&self, block: BlockId) -> bool {
        self.entry(block)
            .is_some_and(|e| self.find(&e.parent, &e.tokens) == Some(block))
    }

    fn holds(&self, block: BlockId, parent: &Parent, tokens: &[TokenId]) -> bool {
        self.entry(block)
            .is_some_and(|e| *e.tokens == *tokens && e.parent == *parent)
    }

    fn hash(&self, parent: &Parent, tokens: &[TokenId]) -> u64 {
        let before = match parent {
            Parent::Root(salt) => self.hasher.hash_one(salt),
            Parent::Block(block) => self.entry(*block).map_or(0, |e| e.hash),
        };
        self.hasher.hash_one((before, tokens))
    }
}
