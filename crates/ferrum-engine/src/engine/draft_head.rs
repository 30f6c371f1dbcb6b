//! Drafts of a head that reads the model's own hidden states: a layer for multi-token prediction, or EAGLE-3.
//!
//! The model's hidden states are tapped of every row that is computed, and those of tokens that turn out right are kept until
//! the head has read them. At position `t` it reads them beside token `t + 1`, so it is always one position behind.
//! Further drafts go on from the head's own hidden states; what it kept of them is overwritten when the model's
//! are there. So a wrong draft leaves nothing behind.
//!
//! What the model did not compute it has no hidden states of: of a prefix that was in the cache. The head begins behind that
//! then, as if the sequence did, and begins anew where its own pool has no room. That makes its drafts worse, and changes no
//! answer. After a preemption it goes on where it was: the tokens are the same.

use super::draft::{DraftRequest, Drafts};
use super::speculation::DraftLength;
use crate::StepRunner;
use crate::pool::{BlockPool, BlockTable};
use ferrum_models::{
    DraftFeatures, FeatureSource, HiddenTap, LogitRows, Readback, SeqStep, StepBatch, StepOutput,
    TapPoint,
};
use ferrum_types::{Result, SeqId, TokenId};
use std::collections::HashMap;

/// See the [module](self).
pub(super) struct DraftHead {
    runner: Box<dyn StepRunner>,
    pool: BlockPool,
    features: DraftFeatures,
    /// Numbers that it reads of the model for each token.
    width: usize,
    seqs: HashMap<SeqId, HeadSeq>,
    most: usize,
    batch: StepBatch,
    wanted: Vec<Readback>,
    output: StepOutput,
}

/// What the head knows of a sequence.
struct HeadSeq {
    table: BlockTable,
    /// The position of the sequence that is the head's first.
    first: usize,
    /// Positions from there on that it has read.
    computed: usize,
    /// The model's hidden states of those behind, `[positions, width]`.
    pending: Vec<f32>,
    length: DraftLength,
}

/// A draft in the making.
struct OpenDraft {
    id: SeqId,
    wanted: usize,
    tokens: Vec<TokenId>,
    /// The head's hidden state beside which the last of them is read.
    hidden: Vec<f32>,
}

impl OpenDraft {
    fn wants_more(&self) -> bool {
        self.tokens.len() < self.wanted
    }
}

impl HeadSeq {
    fn pending_rows(&self, width: usize) -> usize {
        self.pending.len() / width
    }

    /// Goes on at a later position, without what was read.
    fn restart(&mut self, pool: &mut BlockPool, first: usize) {
        pool.release(&mut self.table);
        self.pending.clear();
        (self.first, self.computed) = (first, 0);
    }
}

impl DraftHead {
    /// A head that drafts at most `most` tokens at a time for a model with hidden states of `hidden` numbers.
    pub(super) fn new(
        runner: Box<dyn StepRunner>,
        features: DraftFeatures,
        (most, hidden): (usize, usize),
    ) -> Self {
        Self {
            pool: BlockPool::of_groups(&runner.cache_groups()),
            width: (features.target.len() * hidden).max(1),
            runner,
            features,
            seqs: HashMap::new(),
            most,
            batch: StepBatch::default(),
            wanted: Vec::new(),
            output: StepOutput::default(),
        }
    }

    /// Where it reads hidden states of the model.
    pub(super) fn points(&self) -> &[TapPoint] {
        &self.features.target
    }

    /// Numbers that it reads for each token.
    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// Takes the model's hidden states of positions from `start` on, whose tokens and the one behind them are known.
    pub(super) fn take(&mut self, id: SeqId, start: usize, rows: &[f32]) {
        let (width, most) = (self.width, self.most);
        let seq = self.seqs.entry(id).or_insert_with(|| HeadSeq {
            table: BlockTable::default(),
            first: start,
            computed: 0,
            pending: Vec::new(),
            length: DraftLength::new(most),
        });
        let next = seq.first + seq.computed + seq.pending_rows(width);
        if start > next {
            seq.restart(&mut self.pool, start);
        }
        // What was computed again it has read already.
        let known = next.saturating_sub(start) * width;
        if let Some(new) = rows.get(known..) {
            seq.pending.extend_from_slice(new);
        }
    }

    /// Drafts for those of `asks` that have room. Whether all of them were read to their end.
    pub(super) fn draft(&mut self, asks: &[DraftRequest<'_>]) -> Result<(bool, Drafts)> {
        self.catch_up(asks)?;
        let (ready, mut drafts) = self.read(asks)?;
        let rounds = drafts.iter().map(|draft| draft.wanted).max().unwrap_or(0);
        // The first token came with what was read.
        for _ in 1..rounds {
            self.batch.clear();
            self.batch.feature_source = FeatureSource::Head;
            for draft in drafts.iter().filter(|draft| draft.wants_more()) {
                let (Some(seq), Some(&last)) = (self.seqs.get(&draft.id), draft.tokens.last())
                else {
                    continue;
                };
                let start = seq.computed + draft.tokens.len() - 1;
                self.batch.features.extend_from_slice(&draft.hidden);
                push(&mut self.batch, seq, (&[last], start), LogitRows::Last)?;
                if draft.tokens.len() + 1 < draft.wanted {
                    tap_last(&mut self.batch, self.features.own);
                }
            }
            self.step()?;
            self.take_tokens(&mut drafts);
        }
        let drafts = drafts.into_iter().map(|draft| (draft.id, draft.tokens));
        Ok((ready, drafts.collect()))
    }

    /// Reads what has gathered, but for the last position of each sequence, once it is more than a step. So memory for it is
    /// bounded, however long prompts are and however rarely drafts are wanted.
    fn catch_up(&mut self, asks: &[DraftRequest<'_>]) -> Result<()> {
        let (width, config) = (self.width, *self.runner.config());
        let pending = |seqs: &HashMap<SeqId, HeadSeq>| {
            let rows = seqs.values().map(|seq| seq.pending_rows(width));
            rows.sum::<usize>()
        };
        while pending(&self.seqs) > config.max_tokens {
            self.batch.clear();
            let mut left = config.max_tokens;
            for ask in asks {
                let Some(seq) = self.seqs.get(&ask.id) else {
                    continue;
                };
                let part = seq.pending_rows(width).saturating_sub(1).min(left);
                if part == 0 || self.batch.seqs() == config.max_seqs {
                    continue;
                }
                if self.push_rows(ask, part, (LogitRows::None, 0))? {
                    left -= part;
                }
            }
            if self.batch.tokens.is_empty() {
                // What is there is of sequences that wait.
                return Ok(());
            }
            self.step()?;
        }
        Ok(())
    }

    /// Reads what is new of the sequences that have room. Gives those that are read to their end with a first token, and
    /// whether these are all.
    fn read(&mut self, asks: &[DraftRequest<'_>]) -> Result<(bool, Vec<OpenDraft>)> {
        let config = *self.runner.config();
        let (mut left, mut rows) = (config.max_tokens, config.max_logit_rows);
        let (mut all_ready, mut drafts) = (true, Vec::new());
        self.batch.clear();
        for ask in asks.iter().filter(|ask| ask.room > 0) {
            let Some(seq) = self.seqs.get_mut(&ask.id) else {
                continue;
            };
            let pending = seq.pending_rows(self.width);
            let room = config.context.saturating_sub(seq.computed + pending);
            let wanted = seq.length.next().min(ask.room).min(room);
            if wanted == 0 || pending == 0 {
                continue;
            }
            let part = pending.min(left);
            if part == 0 || rows == 0 || self.batch.seqs() == config.max_seqs {
                all_ready = false;
                continue;
            }
            let ready = part == pending;
            let logits = match ready {
                true => LogitRows::Last,
                false => LogitRows::None,
            };
            if !self.push_rows(ask, part, (logits, wanted))? {
                continue;
            }
            left -= part;
            all_ready &= ready;
            if ready {
                rows -= 1;
                if wanted > 1 {
                    tap_last(&mut self.batch, self.features.own);
                }
                drafts.push(OpenDraft {
                    id: ask.id,
                    wanted,
                    tokens: Vec::with_capacity(wanted),
                    hidden: Vec::new(),
                });
            }
        }
        self.step()?;
        self.take_tokens(&mut drafts);
        Ok((all_ready, drafts))
    }

    /// Adds the next `part` positions of a sequence to the batch; whether there was room in the pool, for `wanted` more, too.
    fn push_rows(
        &mut self,
        ask: &DraftRequest<'_>,
        part: usize,
        (logits, wanted): (LogitRows, usize),
    ) -> Result<bool> {
        let Some(seq) = self.seqs.get_mut(&ask.id) else {
            return Ok(false);
        };
        let (start, end) = (seq.computed, seq.computed + part);
        self.pool.release_behind(&mut seq.table, start);
        let size = end + wanted;
        let fits = size <= self.runner.config().context;
        // Beside token `t + 1` it reads the hidden states at `t`.
        let tokens = ask.tokens.get(seq.first + start + 1..seq.first + end + 1);
        let (Some(tokens), true) = (tokens, fits) else {
            let behind = seq.first + start + seq.pending_rows(self.width);
            seq.restart(&mut self.pool, behind);
            return Ok(false);
        };
        if !self.pool.grow_to(&mut seq.table, size, size) {
            // Others may need the blocks more; it begins anew with what comes.
            let behind = seq.first + start + seq.pending_rows(self.width);
            seq.restart(&mut self.pool, behind);
            return Ok(false);
        }
        let rows = seq.pending.drain(..part * self.width);
        self.batch.features.extend(rows);
        push(&mut self.batch, seq, (tokens, start), logits)?;
        seq.computed = end;
        Ok(true)
    }

    /// Runs the batch.
    fn step(&mut self) -> Result<()> {
        if self.batch.tokens.is_empty() {
            self.output.begin(&[], 0, 0);
            return Ok(());
        }
        self.wanted.clear();
        let rows = self.batch.logit_rows.len();
        self.wanted.resize(rows, Readback::GREEDY);
        self.runner.run(&self.batch, &self.wanted, &mut self.output)
    }

    /// Gives each draft that wants one its next token, and the head's hidden state for the one after it.
    fn take_tokens(&mut self, drafts: &mut [OpenDraft]) {
        let dim = self.runner.spec().hidden_size;
        let mut hidden = self.output.tapped().chunks_exact(dim);
        let open = drafts.iter_mut().filter(|draft| draft.wants_more());
        for (draft, (_, best)) in open.zip(self.output.tokens()) {
            let best = best.unwrap_or(0);
            let own = self.features.tokens.as_ref();
            let token = own.and_then(|tokens| tokens.get(best as usize).copied());
            draft.tokens.push(token.unwrap_or(best));
            if draft.wants_more()
                && let Some(row) = hidden.next()
            {
                draft.hidden.clear();
                draft.hidden.extend_from_slice(row);
            }
        }
    }

    /// How the last draft for a sequence turned out.
    pub(super) fn learn(&mut self, id: SeqId, tried: usize, right: usize) {
        if let Some(seq) = self.seqs.get_mut(&id) {
            seq.length.learn(tried, right);
        }
    }

    /// A sequence has ended.
    pub(super) fn forget(&mut self, id: SeqId) {
        if let Some(mut seq) = self.seqs.remove(&id) {
            self.pool.release(&mut seq.table);
        }
    }
}

/// Adds tokens of a sequence from position `start` of the head on.
fn push(
    batch: &mut StepBatch,
    seq: &HeadSeq,
    (tokens, start): (&[TokenId], usize),
    logits: LogitRows,
) -> Result<()> {
    batch.push(SeqStep {
        tokens,
        start,
        // Frequencies that depend on the length take that of what is read so far.
        prompt_len: start + tokens.len(),
        blocks: seq.table.blocks(),
        logits,
        adapter: None,
        hidden: false,
    })?;
    for group in 1..seq.table.groups() {
        batch.add_table(group, seq.table.group(group))?;
    }
    Ok(())
}

/// The last row of the batch wants the head's hidden state.
fn tap_last(batch: &mut StepBatch, point: TapPoint) {
    let row = batch.tokens.len().saturating_sub(1) as u32;
    batch.taps.push(HiddenTap { point, row });
}
