//! [`StoredEntry`]: the bytes of a prefix-cache entry outside of the device.

use ferrum_formats::kv_blocks::KvBlockKey;
use std::fmt;

/// An entry in an offload tier.
pub(crate) struct StoredEntry {
    pub(crate) key: KvBlockKey,
    /// What it is: the origin, the salt and the tokens of its prefix.
    pub(crate) description: Box<[u8]>,
    pub(crate) bytes: Vec<u8>,
}

impl fmt::Debug for StoredEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StoredEntry({} bytes)", self.bytes.len())
    }
}

impl StoredEntry {
    /// Its stored bytes, as [`StepRunner::read_kv_blocks`](crate::StepRunner::read_kv_blocks) or [`StepRunner::read_state`](crate::StepRunner::read_state) gave them.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// An entry of these bytes without a prefix.
    #[cfg(test)]
    pub(crate) fn of_bytes(bytes: Vec<u8>) -> Self {
        Self {
            key: KvBlockKey::root(b"", b""),
            description: Box::default(),
            bytes,
        }
    }

    pub(crate) fn size(&self) -> u64 {
        (self.description.len() + self.bytes.len()) as u64
    }
}
