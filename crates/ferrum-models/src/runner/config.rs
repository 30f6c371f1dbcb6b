//! [`RunnerConfig`]: the sizes that a runner allocates for.

use super::graphs::{MAX_QUERIES, captured_queries};
use ferrum_types::{Error, Result};

/// How the KV pool is cut into blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvLayout {
    /// Blocks of this many tokens.
    Paged {
        /// Tokens in a block.
        block_size: usize,
    },
    /// As `Paged`, with a block table for each [cache group](crate::CacheGroup): layers with a window keep no more
    /// blocks than it needs.
    Grouped {
        /// Tokens in a block.
        block_size: usize,
    },
    /// One block of the whole context for each sequence.
    Contiguous,
}

/// Sizes that a runner allocates for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunnerConfig {
    /// Longest sequence.
    pub context: usize,
    /// Most sequences in a step.
    pub max_seqs: usize,
    /// Most tokens in a step.
    pub max_tokens: usize,
    /// Most rows of logits in a step.
    pub max_logit_rows: usize,
    /// Tokens that the KV pool holds over all sequences (rounded up to blocks).
    pub kv_tokens: usize,
    /// Recurrent states that are kept beside those of running sequences, where layers have them: a prefix is found
    /// again where a state was kept.
    pub kept_states: usize,
    /// Blocks.
    pub layout: KvLayout,
    /// Whether each op is measured, for [`DecoderRunner::take_spans`](crate::DecoderRunner::take_spans). Steps are then not captured.
    pub profile: bool,
}

impl RunnerConfig {
    /// One sequence of up to `context` tokens, prompts in chunks of at most 512.
    pub fn single(context: usize) -> Self {
        Self {
            context,
            max_seqs: 1,
            max_tokens: context.clamp(1, 512),
            max_logit_rows: 1,
            kv_tokens: context,
            kept_states: 0,
            layout: KvLayout::Grouped { block_size: 32 },
            profile: false,
        }
    }

    /// Rows of logits of a step in which each of `seqs` sequences has so many drafted tokens, filled up as devices that capture steps
    /// have it.
    pub fn rows_with_drafts(seqs: usize, drafts: usize) -> usize {
        let queries = drafts.saturating_add(1);
        // Longer ones are not captured.
        let filled = Some(captured_queries(queries)).filter(|&filled| filled <= MAX_QUERIES);
        seqs.saturating_mul(filled.unwrap_or(queries))
    }

    pub(super) fn max_blocks_per_seq(&self) -> usize {
        match self.layout {
            KvLayout::Paged { block_size } | KvLayout::Grouped { block_size } => {
                self.context.div_ceil(block_size.max(1))
            }
            KvLayout::Contiguous => 1,
        }
    }

    pub(super) fn validate(&self) -> Result<()> {
        let block_size = match self.layout {
            KvLayout::Paged { block_size } | KvLayout::Grouped { block_size } => block_size,
            KvLayout::Contiguous => 1,
        };
        let sizes = [
            ("context", self.context),
            ("sequences", self.max_seqs),
            ("tokens of a step", self.max_tokens),
            ("rows of logits", self.max_logit_rows),
            ("tokens of the KV cache", self.kv_tokens),
            ("tokens of a block", block_size),
        ];
        let wrong = |&&(_, n): &&(&str, usize)| n == 0 || n > i32::MAX as usize;
        match sizes.iter().find(wrong) {
            None => Ok(()),
            Some((name, n)) => {
                let reason = format!("{name}: found {n}, expected 1 to {}", i32::MAX);
                Err(Error::invalid("runner", reason))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Drafts are filled up to a power of two, or such steps would not be captured.
    #[test]
    fn rows_have_room_for_captured_drafts() {
        let found = [(1, 0), (16, 0), (16, 1), (16, 4), (16, 5), (3, 8), (3, 33)]
            .map(|(seqs, drafts)| RunnerConfig::rows_with_drafts(seqs, drafts));
        assert_eq!(found, [1, 16, 32, 80, 144, 27, 102]);
    }
}
