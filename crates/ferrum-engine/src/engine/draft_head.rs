//! Drafts of a head that reads the model's hidden states: a layer for multi-token prediction, or EAGLE-3.
//!
//! The model's hidden states are read for every computed row, and those of accepted tokens are kept until the head has
//! read them. At position `t` the head reads them together with token `t + 1`, so it lags the model by one position.
//! Further draft tokens continue from the head's own hidden states. Its keys and values for them are overwritten when the
//! model's hidden states are known, so a rejected draft needs no rollback.
//!
//! The model computes no hidden states for a prefix from the cache. The head then starts after that prefix, as if the
//! sequence started there, and it starts again where its own pool has no room. That makes its drafts worse and does not
//! change the output. After a preemption it continues at the same position: the tokens are the same.

use super::draft::{DraftRequest, Drafts};
use super::speculation::DraftLength;
use crate::StepRunner;
use crate::pool::{BlockPool, BlockTable};
use ferrum_models::{
    AuxHiddenPoint, AuxHiddenState, DraftFeatures, FeatureSource, LogitRows, Readback, SeqStep,
    StepBatch, StepOutput,
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
    readbacks: Vec<Readback>,
    output: StepOutput,
}

/// State of the head for a sequence.
struct HeadSeq {
    table: BlockTable,
    /// The position of the sequence that is the head's first.
    first: usize,
    /// Positions from there on that it has read.
    computed: usize,
    /// The model's hidden states of the positions after those, `[positions, width]`.
    pending: Vec<f32>,
    length: DraftLength,
}

/// A draft that is being computed.
struct PendingDraft {
    id: SeqId,
    wanted: usize,
    tokens: Vec<TokenId>,
    /// The head's hidden state beside which the last of them is read.
    hidden: Vec<f32>,
}

impl PendingDraft {
    fn wants_more(&self) -> bool {
        self.tokens.len() < self.wanted
    }
}

impl HeadSeq {
    fn pending_rows(&self, width: usize) -> usize {
        self.pending.len() / width
    }

    /// Restarts at a later position and drops what was read.
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
            readbacks: Vec::new(),
            output: StepOutput::default(),
        }
    }

    /// Where it reads hidden states of the model.
    pub(super) fn points(&self) -> &[AuxHiddenPoint] {
        &self.features.target
    }

    /// Numbers that it reads for each token.
    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// Takes the model's hidden states of positions from `start` on. Their tokens and the token after them are known.
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
        // The head has already read positions that were computed again.
        let known = next.saturating_sub(start) * width;
        if let Some(new) = rows.get(known..) {
            seq.pending.extend_from_slice(new);
        }
    }

    /// Drafts for those of `requests` that have room. Also returns whether all of them were read to their end.
    pub(super) fn draft(&mut self, requests: &[DraftRequest<'_>]) -> Result<(bool, Drafts)> {
        self.catch_up(requests)?;
        let (ready, mut drafts) = self.read(requests)?;
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
                    add_aux_hidden_last(&mut self.batch, self.features.own);
                }
            }
            self.step()?;
            self.take_tokens(&mut drafts);
        }
        let drafts = drafts.into_iter().map(|draft| (draft.id, draft.tokens));
        Ok((ready, drafts.collect()))
    }

    /// Reads pending hidden states, except for the last position of each sequence, once they are more than a step. So their
    /// memory is bounded, however long prompts are and however rarely drafts are requested.
    fn catch_up(&mut self, requests: &[DraftRequest<'_>]) -> Result<()> {
        let (width, config) = (self.width, *self.runner.config());
        let pending = |seqs: &HashMap<SeqId, HeadSeq>| {
            let rows = seqs.values().map(|seq| seq.pending_rows(width));
            rows.sum::<usize>()
        };
        while pending(&self.seqs) > config.max_tokens {
            self.batch.clear();
            let mut left = config.max_tokens;
            for request in requests {
                let Some(seq) = self.seqs.get(&request.id) else {
                    continue;
                };
                let part = seq.pending_rows(width).saturating_sub(1).min(left);
                if part == 0 || self.batch.seqs() == config.max_seqs {
                    continue;
                }
                if self.push_rows(request, part, (LogitRows::None, 0))? {
                    left -= part;
                }
            }
            if self.batch.tokens.is_empty() {
                // The pending rows belong to sequences that wait.
                return Ok(());
            }
            self.step()?;
        }
        Ok(())
    }

    /// Reads pending hidden states of the sequences that have room. Returns those that are read to their end, with a first
    /// draft token, and whether these are all.
    fn read(&mut self, requests: &[DraftRequest<'_>]) -> Result<(bool, Vec<PendingDraft>)> {
        let config = *self.runner.config();
        let (mut left, mut rows) = (config.max_tokens, config.max_logit_rows);
        let (mut all_ready, mut drafts) = (true, Vec::new());
        self.batch.clear();
        for request in requests.iter().filter(|request| request.room > 0) {
            let Some(seq) = self.seqs.get_mut(&request.id) else {
                continue;
            };
            let pending = seq.pending_rows(self.width);
            let room = config.context.saturating_sub(seq.computed + pending);
            let wanted = seq.length.next().min(request.room).min(room);
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
            if !self.push_rows(request, part, (logits, wanted))? {
                continue;
            }
            left -= part;
            all_ready &= ready;
            if ready {
                rows -= 1;
                if wanted > 1 {
                    add_aux_hidden_last(&mut self.batch, self.features.own);
                }
                drafts.push(PendingDraft {
                    id: request.id,
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

    /// Adds the next `part` positions of a sequence to the batch. Returns whether the pool had room for them and for `wanted`
    /// more.
    fn push_rows(
        &mut self,
        request: &DraftRequest<'_>,
        part: usize,
        (logits, wanted): (LogitRows, usize),
    ) -> Result<bool> {
        let Some(seq) = self.seqs.get_mut(&request.id) else {
            return Ok(false);
        };
        let (start, end) = (seq.computed, seq.computed + part);
        self.pool.release_before_window(&mut seq.table, start);
        let size = end + wanted;
        let fits = size <= self.runner.config().context;
        // It reads the hidden states at `t` together with token `t + 1`.
        let tokens = request
            .tokens
            .get(seq.first + start + 1..seq.first + end + 1);
        let (Some(tokens), true) = (tokens, fits) else {
            let after = seq.first + start + seq.pending_rows(self.width);
            seq.restart(&mut self.pool, after);
            return Ok(false);
        };
        if !self.pool.grow_to(&mut seq.table, size, size) {
            // Gives its blocks to other sequences and restarts with the next positions.
            let after = seq.first + start + seq.pending_rows(self.width);
            seq.restart(&mut self.pool, after);
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
        self.readbacks.clear();
        let rows = self.batch.logit_rows.len();
        self.readbacks.resize(rows, Readback::GREEDY);
        self.runner
            .run(&self.batch, &self.readbacks, &mut self.output)
    }

    /// Appends the next token to each unfinished draft and stores the head's hidden state for the token after it.
    fn take_tokens(&mut self, drafts: &mut [PendingDraft]) {
        let dim = self.runner.spec().hidden_size;
        let mut hidden = self.output.aux_hidden().chunks_exact(dim);
        let unfinished = drafts.iter_mut().filter(|draft| draft.wants_more());
        for (draft, (_, best)) in unfinished.zip(self.output.tokens()) {
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

    /// Records the outcome of the last draft for a sequence.
    pub(super) fn record(&mut self, id: SeqId, drafted: usize, accepted: usize) {
        if let Some(seq) = self.seqs.get_mut(&id) {
            seq.length.record(drafted, accepted);
        }
    }

    /// Drops the state of a sequence that has ended.
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

/// Asks for the head's hidden state at the last row of the batch.
fn add_aux_hidden_last(batch: &mut StepBatch, point: AuxHiddenPoint) {
    let row = batch.tokens.len().saturating_sub(1) as u32;
    batch.aux_hidden.push(AuxHiddenState { point, row });
}
