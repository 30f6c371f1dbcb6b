//! [`DecodeBackend`]: an object-safe view on a runner for callers that think in sequences, one token
//! at a time, and do not want to be generic.

use crate::batch::{LogitRows, SeqStep, StepBatch};
use crate::kv_blocks::KvBlockLayout;
use crate::readback::{Readback, StepOutput};
use crate::runner::DecoderRunner;
use ferrum_kernels::LlmBackend;
use ferrum_types::{BlockId, Error, Result, SeqId, StateSlot, TokenId};

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

    /// What the bytes of a block are. Decoders with equal layouts can hand caches to one another, whatever their
    /// devices.
    ///
    /// # Errors
    /// `InvalidArgument` when a block is larger than the address space, or sequences have recurrent states, which no
    /// block holds.
    fn kv_block_layout(&self) -> Result<KvBlockLayout>;

    /// The keys and values of `seq`, whole blocks of its `tokens` tokens, for another decoder's
    /// [`init_kv_cache`](Self::init_kv_cache): `(tokens, blocks)`.
    ///
    /// # Errors
    /// `InvalidArgument` when `seq` has no cache.
    fn read_kv_cache(&mut self, seq: SeqId) -> Result<(usize, Vec<u8>)>;

    /// Gives `seq` a cache with the keys and values of a prompt of `tokens` tokens that ran elsewhere
    /// (another device, another process), as blocks of this layout. What lies behind the last token does not matter.
    ///
    /// # Errors
    /// As [`prefill`](Self::prefill); `Shape` when `blocks` has another length. Then `seq` has no cache.
    fn init_kv_cache(&mut self, seq: SeqId, tokens: usize, blocks: &[u8]) -> Result<()>;

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

/// A [`DecoderRunner`] as a [`DecodeBackend`]: gives each sequence an equal, fixed share of the pool.
pub struct RunnerDecode<B: LlmBackend> {
    runner: DecoderRunner<B>,
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

impl<B: LlmBackend> RunnerDecode<B> {
    /// Room for the runner's `max_seqs` sequences.
    pub fn new(runner: impl Into<DecoderRunner<B>>) -> Self {
        let runner = runner.into();
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

    /// The place of `seq`.
    fn taken_slot(&self, op: &'static str, seq: SeqId) -> Result<(usize, Slot)> {
        let found = self.slot_of(seq);
        let found = found.and_then(|index| Some((index, self.slots[index]?)));
        found.ok_or_else(|| Error::invalid(op, format!("sequence {} has no cache", seq.0)))
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

    /// The blocks of a place.
    fn blocks(&self, index: usize) -> Vec<BlockId> {
        let first = index * self.blocks_per_slot;
        let blocks = first..first + self.blocks_per_slot;
        blocks.map(|b| BlockId(b as u32)).collect()
    }

    fn check_capacity(&self, requested: usize) -> Result<()> {
        let places = self.blocks_per_slot * self.runner.pool().block_size;
        let capacity = places.min(self.runner.config().context);
        match requested > capacity {
            true => Err(Error::ContextOverflow {
                requested,
                capacity,
            }),
            false => Ok(()),
        }
    }

    /// Runs `tokens` in steps and gives the logits of the last one.
    fn append(&mut self, index: usize, slot: Slot, tokens: &[TokenId]) -> Result<Vec<f32>> {
        let len = slot.len + tokens.len();
        self.check_capacity(len)?;
        let blocks = self.blocks(index);
        let chunk = self.runner.config().max_tokens;
        let mut output = StepOutput::default();
        for start in (0..tokens.len()).step_by(chunk) {
            let end = (start + chunk).min(tokens.len());
            self.batch.clear();
            self.batch.push(SeqStep {
                tokens: &tokens[start..end],
                start: slot.len + start,
                prompt_len: slot.prompt_len,
                blocks: &blocks,
                hidden: false,
                logits: if end == tokens.len() {
                    LogitRows::Last
                } else {
                    LogitRows::None
                },
                adapter: None,
            })?;
            if self.runner.state_slots().is_some() {
                self.batch.add_state(StateSlot(index as u32));
            }
            let wanted = &[Readback::Logits][..self.batch.logit_rows.len()];
            self.runner.run(&self.batch, wanted, &mut output)?;
        }
        self.slots[index] = Some(Slot { len, ..slot });
        Ok(output.logits().to_vec())
    }
}

impl<B: LlmBackend> DecodeBackend for RunnerDecode<B> {
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

    fn kv_block_layout(&self) -> Result<KvBlockLayout> {
        if self.runner.state_slots().is_some() {
            let reason = "the blocks of a model with recurrent states are not all of its cache";
            return Err(Error::invalid("kv_blocks", reason));
        }
        self.runner.kv_block_layout(0)
    }

    fn read_kv_cache(&mut self, seq: SeqId) -> Result<(usize, Vec<u8>)> {
        let (index, slot) = self.taken_slot("read_kv_cache", seq)?;
        let layout = self.kv_block_layout()?;
        let blocks = &self.blocks(index)[..slot.len.div_ceil(layout.block_size)];
        let mut bytes = vec![0; layout.bytes * blocks.len()];
        self.runner.read_kv_blocks(0, blocks, &mut bytes)?;
        Ok((slot.len, bytes))
    }

    fn init_kv_cache(&mut self, seq: SeqId, tokens: usize, blocks: &[u8]) -> Result<()> {
        let (index, slot) = self.new_slot("init_kv_cache", seq, tokens)?;
        self.check_capacity(tokens)?;
        let count = tokens.div_ceil(self.kv_block_layout()?.block_size);
        let places = self.blocks(index);
        self.runner.write_kv_blocks(0, &places[..count], blocks)?;
        self.slots[index] = Some(Slot {
            len: tokens,
            ..slot
        });
        Ok(())
    }

    fn decode_step(&mut self, seq: SeqId, token: TokenId) -> Result<Vec<f32>> {
        let (index, slot) = self.taken_slot("decode_step", seq)?;
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
