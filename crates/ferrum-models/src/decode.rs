//! [`DecodeBackend`]: an object-safe view on a runner for callers that think in sequences, one token
//! at a time, and do not want to be generic.

use crate::batch::{LogitRows, SeqStep, StepBatch};
use crate::readback::{Readback, StepOutput};
use crate::runner::{LayerKv, ModelRunner};
use ferrum_kernels::{BackendKvDtype, KvDtypeKind, LlmBackend};
use ferrum_types::{BlockId, Error, Result, SeqId, TokenId};
use std::ops::Range;

/// Decoding of independent sequences, each with its own cache.
pub trait DecodeBackend: Send {
    /// Name of the backend.
    fn name(&self) -> &'static str;

    /// Elements of a row of logits.
    fn vocab_size(&self) -> usize;

    /// Runs a prompt, which fills the cache of `seq` with its keys and values, and gives the logits
    /// of its last token, `[vocab]`.
    ///
    /// # Errors
    /// `InvalidArgument` when `seq` has a cache already, the prompt is empty or no place is left;
    /// `ContextOverflow`.
    fn prefill(&mut self, seq: SeqId, prompt: &[TokenId]) -> Result<Vec<f32>>;

    /// Gives `seq` a cache with the keys and values of a prompt of `tokens` tokens that ran elsewhere
    /// (another device, another process). `layers` is in model order.
    ///
    /// # Errors
    /// As [`prefill`](Self::prefill); `Shape` when `layers` is not of the model's sizes. Then `seq`
    /// has no cache.
    fn init_kv_cache(&mut self, seq: SeqId, tokens: usize, layers: &[LayerKv<'_>]) -> Result<()>;

    /// Appends `token` to `seq` and gives the logits after it, `[vocab]`.
    ///
    /// # Errors
    /// `InvalidArgument` when `seq` has no cache; `ContextOverflow`.
    fn decode_step(&mut self, seq: SeqId, token: TokenId) -> Result<Vec<f32>>;

    /// Whether `seq` has a cache.
    fn has_kv_cache(&self, seq: SeqId) -> bool;

    /// Frees the cache of `seq`; whether there was one.
    fn release_kv_cache(&mut self, seq: SeqId) -> bool;
}

/// A [`ModelRunner`] as a [`DecodeBackend`]: gives each sequence an equal, fixed share of the pool.
pub struct RunnerDecode<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind> {
    runner: ModelRunner<B, K>,
    batch: StepBatch,
    /// `slots[i]` owns the `i`-th share of the pool: its sequence and that sequence's length.
    slots: Vec<Option<Slot>>,
    blocks_per_slot: usize,
}

#[derive(Clone, Copy)]
struct Slot {
    seq: SeqId,
    prompt_len: usize,
    len: usize,
}

impl<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind> RunnerDecode<B, K> {
    /// Room for the runner's `max_seqs` sequences.
    pub fn new(runner: ModelRunner<B, K>) -> Self {
        let slots = runner.config().max_seqs;
        let blocks_per_slot = runner.pool().blocks / slots;
        Self {
            runner,
            batch: StepBatch::default(),
            slots: vec![None; slots],
            blocks_per_slot,
        }
    }

    fn slot_of(&self, seq: SeqId) -> Option<usize> {
        self.slots
            .iter()
            .position(|slot| slot.is_some_and(|s| s.seq == seq))
    }

    /// A free place for `seq`, whose prompt has `tokens` tokens.
    fn new_slot(&self, op: &'static str, seq: SeqId, tokens: usize) -> Result<(usize, Slot)> {
        let fail = |reason: String| Err(Error::invalid(op, reason));
        if tokens == 0 {
            return fail("the prompt has no token".into());
        }
        if self.has_kv_cache(seq) {
            return fail(format!("sequence {} has a cache already", seq.0));
        }
        let Some(index) = self.slots.iter().position(Option::is_none) else {
            return fail(format!("all {} places are taken", self.slots.len()));
        };
        let slot = Slot {
            seq,
            prompt_len: tokens,
            len: 0,
        };
        Ok((index, slot))
    }

    /// Cuts `tokens` into steps and calls `run` with each, and with the range of tokens that it is.
    fn in_chunks(
        &mut self,
        index: usize,
        slot: Slot,
        tokens: &[TokenId],
        mut run: impl FnMut(&mut ModelRunner<B, K>, &StepBatch, Range<usize>) -> Result<()>,
    ) -> Result<()> {
        let pool = self.runner.pool();
        let capacity = (self.blocks_per_slot * pool.block_size).min(self.runner.config().context);
        let requested = slot.len + tokens.len();
        if requested > capacity {
            return Err(Error::ContextOverflow {
                requested,
                capacity,
            });
        }
        let first = index * self.blocks_per_slot;
        let blocks: Vec<BlockId> = (first..first + self.blocks_per_slot)
            .map(|b| BlockId(b as u32))
            .collect();
        let chunk = self.runner.config().max_tokens;
        for start in (0..tokens.len()).step_by(chunk) {
            let part = start..(start + chunk).min(tokens.len());
            self.batch.clear();
            self.batch.push(SeqStep {
                tokens: &tokens[part.clone()],
                start: slot.len + start,
                prompt_len: slot.prompt_len,
                blocks: &blocks,
                hidden: false,
                logits: if part.end == tokens.len() {
                    LogitRows::Last
                } else {
                    LogitRows::None
                },
                adapter: None,
            })?;
            run(&mut self.runner, &self.batch, part)?;
        }
        let len = requested;
        self.slots[index] = Some(Slot { len, ..slot });
        Ok(())
    }

    /// Runs `tokens` and gives the logits of the last one.
    fn append(&mut self, index: usize, slot: Slot, tokens: &[TokenId]) -> Result<Vec<f32>> {
        let mut output = StepOutput::default();
        self.in_chunks(index, slot, tokens, |runner, batch, _| {
            let wanted = &[Readback::Logits][..batch.logit_rows.len()];
            runner.run(batch, wanted, &mut output)
        })?;
        Ok(output.logits().to_vec())
    }
}

impl<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind> DecodeBackend for RunnerDecode<B, K> {
    fn name(&self) -> &'static str {
        B::NAME
    }

    fn vocab_size(&self) -> usize {
        self.runner.spec().vocab_size
    }

    fn prefill(&mut self, seq: SeqId, prompt: &[TokenId]) -> Result<Vec<f32>> {
        let (index, slot) = self.new_slot("prefill", seq, prompt.len())?;
        self.append(index, slot, prompt)
    }

    fn init_kv_cache(&mut self, seq: SeqId, tokens: usize, layers: &[LayerKv<'_>]) -> Result<()> {
        let (index, slot) = self.new_slot("init_kv_cache", seq, tokens)?;
        let pool = self.runner.pool();
        let width = pool.kv_heads * pool.head_dim;
        self.runner.check_kv(layers, tokens)?;
        // Only the number of tokens matters: their keys and values are known.
        let ids = vec![0; tokens];
        self.in_chunks(index, slot, &ids, |runner, batch, part| {
            let elements = part.start * width..part.end * width;
            let layers: Vec<_> = layers
                .iter()
                .map(|layer| LayerKv {
                    keys: &layer.keys[elements.clone()],
                    values: &layer.values[elements.clone()],
                })
                .collect();
            runner.import_kv(batch, &layers)
        })
    }

    fn decode_step(&mut self, seq: SeqId, token: TokenId) -> Result<Vec<f32>> {
        let found = self
            .slot_of(seq)
            .and_then(|index| Some((index, self.slots[index]?)));
        let Some((index, slot)) = found else {
            let reason = format!("sequence {} has no cache", seq.0);
            return Err(Error::invalid("decode_step", reason));
        };
        self.append(index, slot, &[token])
    }

    fn has_kv_cache(&self, seq: SeqId) -> bool {
        self.slot_of(seq).is_some()
    }

    fn release_kv_cache(&mut self, seq: SeqId) -> bool {
        self.slot_of(seq)
            .and_then(|index| self.slots[index].take())
            .is_some()
    }
}
