//! Drafts of a smaller model, which the model verifies in one step (Leviathan et al., "Fast inference from transformers via
//! speculative decoding", 2023).
//!
//! As with [`prompt_lookup`](super::prompt_lookup), a draft never changes the output: the sampler chooses each token from
//! the same logits as without it. Greedy output is the same to the bit, and sampled output is the same for its seed. The
//! drafts are the draft model's likeliest tokens.
//!
//! One batch drafts for all sequences that decode. The draft model first reads the tokens of a sequence that it has not
//! read yet, at most a step's tokens at a time, so that a long prompt does not delay other sequences for long.

use super::speculation::DraftLength;
use crate::StepRunner;
use crate::pool::{BlockPool, BlockTable};
use ferrum_models::{LogitRows, Readback, SeqStep, StepBatch, StepOutput};
use ferrum_types::{Result, SeqId, TokenId};
use std::collections::HashMap;

/// A request for drafts for one sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct DraftRequest<'t> {
    pub(super) id: SeqId,
    /// All its tokens, the one that was chosen last included.
    pub(super) tokens: &'t [TokenId],
    /// Most tokens to draft.
    pub(super) room: usize,
}

/// See the [module](self).
pub(super) struct DraftModel {
    runner: Box<dyn StepRunner>,
    pool: BlockPool,
    seqs: HashMap<SeqId, DraftSeq>,
    most: usize,
    batch: StepBatch,
    readbacks: Vec<Readback>,
    output: StepOutput,
}

/// State of the draft model for a sequence.
struct DraftSeq {
    table: BlockTable,
    /// Tokens whose keys and values are in `table`.
    computed: Vec<TokenId>,
    length: DraftLength,
}

/// Drafted tokens by sequence.
pub(super) type Drafts = Vec<(SeqId, Vec<TokenId>)>;

/// A draft that is being computed.
struct PendingDraft {
    id: SeqId,
    wanted: usize,
    tokens: Vec<TokenId>,
}

impl DraftModel {
    /// A draft model that drafts at most `most` tokens at a time.
    pub(super) fn new(runner: Box<dyn StepRunner>, most: usize) -> Self {
        Self {
            pool: BlockPool::of_groups(&runner.cache_groups()),
            runner,
            seqs: HashMap::new(),
            most,
            batch: StepBatch::default(),
            readbacks: Vec::new(),
            output: StepOutput::default(),
        }
    }

    /// Drafts for all of `requests`. Sequences that are not read to their end or have no room get no draft. Also returns
    /// whether all sequences with room were read to their end.
    pub(super) fn draft(&mut self, requests: &[DraftRequest<'_>]) -> Result<(bool, Drafts)> {
        let (ready, mut drafts) = self.read(requests)?;
        let mut rounds = 0..drafts.iter().map(|g| g.wanted).max().unwrap_or(0);
        // The first draft came with what was read.
        rounds.next();
        for _ in rounds {
            self.batch.clear();
            let more = |draft: &PendingDraft| draft.tokens.len() < draft.wanted;
            for draft in drafts.iter().filter(|draft| more(draft)) {
                let (Some(seq), Some(last)) = (self.seqs.get_mut(&draft.id), draft.tokens.last())
                else {
                    continue;
                };
                push(&mut self.batch, seq, &[*last], LogitRows::Last)?;
            }
            self.step()?;
            let unfinished = drafts.iter_mut().filter(|draft| more(draft));
            for (draft, (_, best)) in unfinished.zip(self.output.tokens()) {
                draft.tokens.push(best.unwrap_or(0));
            }
        }
        let drafts = drafts.into_iter();
        let drafts = drafts.map(|draft| (draft.id, draft.tokens));
        Ok((ready, drafts.collect()))
    }

    /// Reads new tokens of the sequences. Returns those that are read to their end, with their first draft token, and
    /// whether these are all that have room.
    fn read(&mut self, requests: &[DraftRequest<'_>]) -> Result<(bool, Vec<PendingDraft>)> {
        let config = *self.runner.config();
        let (mut left, mut rows) = (config.max_tokens, config.max_logit_rows);
        let (mut all_ready, mut drafts) = (true, Vec::new());
        self.batch.clear();
        for request in requests.iter().take(config.max_seqs) {
            let most = self.most;
            let seq = self.seqs.entry(request.id).or_insert_with(|| DraftSeq {
                table: BlockTable::default(),
                computed: Vec::new(),
                length: DraftLength::new(most),
            });
            let known = seq.common(request.tokens);
            seq.computed.truncate(known);
            let end = request.tokens.len();
            let room = config.context.saturating_sub(end);
            let wanted = seq.length.next().min(request.room).min(room);
            let part = left.min(end - known);
            if wanted == 0 {
                continue;
            }
            if part == 0 || rows == 0 {
                all_ready = false;
                continue;
            }
            // Accepted tokens are final, so keys before the window are not read again.
            self.pool.release_before_window(&mut seq.table, known);
            let windowed = known + part + wanted;
            if !self.pool.grow_to(&mut seq.table, end + wanted, windowed) {
                // Gives its blocks to other sequences; it is read again when there is room.
                self.pool.release(&mut seq.table);
                seq.computed.clear();
                continue;
            }
            left -= part;
            let ready = known + part == end;
            all_ready &= ready;
            let logits = match ready {
                true => LogitRows::Last,
                false => LogitRows::None,
            };
            push(
                &mut self.batch,
                seq,
                &request.tokens[known..known + part],
                logits,
            )?;
            if ready {
                rows -= 1;
                drafts.push(PendingDraft {
                    id: request.id,
                    wanted,
                    tokens: Vec::with_capacity(wanted),
                });
            }
        }
        self.step()?;
        for (draft, (_, best)) in drafts.iter_mut().zip(self.output.tokens()) {
            draft.tokens.push(best.unwrap_or(0));
        }
        Ok((all_ready, drafts))
    }

    /// Runs the batch and picks the likeliest token of each row.
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

impl DraftSeq {
    /// Number of leading `tokens` that need not be read again. The last token is always read, as its logits give the first
    /// draft token.
    fn common(&self, tokens: &[TokenId]) -> usize {
        let same = self.computed.iter().zip(tokens).take_while(|(a, b)| a == b);
        same.count().min(tokens.len() - 1)
    }
}

/// Adds tokens of a sequence to a batch and to its computed tokens.
fn push(
    batch: &mut StepBatch,
    seq: &mut DraftSeq,
    tokens: &[TokenId],
    logits: LogitRows,
) -> Result<()> {
    let start = seq.computed.len();
    seq.computed.extend_from_slice(tokens);
    batch.push(SeqStep {
        tokens,
        start,
        // Frequencies that depend on the length take that of what is read so far.
        prompt_len: seq.computed.len(),
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
