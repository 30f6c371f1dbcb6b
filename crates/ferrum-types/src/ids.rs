//! Ids that must not be mixed up.

/// Index of a token in a vocabulary.
pub type TokenId = u32;

/// A sequence known to a runner or scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SeqId(pub u64);

/// A LoRA adapter on a runner. Never given twice, so what was computed with one is not taken for
/// another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AdapterId(pub u32);

/// A place for the recurrent state of a sequence, in each layer that has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StateSlot(pub u32);

/// A block of the paged KV pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

impl BlockId {
    /// The entry of a block table whose block was given back, because no later token sees its keys (a sliding
    /// window). No pool has a block of this number, and as a signed entry of a table on a device it is -1.
    pub const RELEASED: Self = Self(u32::MAX);
}
