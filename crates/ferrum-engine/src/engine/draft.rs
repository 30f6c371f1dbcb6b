//! A smaller model's guesses at the next tokens, which the model then checks in one step (Leviathan et
//! al., "Fast inference from transformers via speculative decoding", 2023).
//!
//! As with [`lookup`](super::lookup), a guess never changes an answer: the sampler chooses each token from
//! the logits that it would have had anyway. So a greedy answer is the same to the bit, and a sampled one
//! is the same for its seed. The guesses are the small model's likeliest tokens.
//!
//! All sequences that decode are guessed for together. What the small model has not read of them yet, it
//! reads first, at most a step's tokens at a time, so that a long prompt delays nobody for long.

use super::guess::GuessLength;
use crate::StepRunner;
use crate::pool::{BlockPool, BlockTable};
use ferrum_models::{LogitRows, Readback, SeqStep, StepBatch, StepOutput};
use ferrum_types::{Result, SeqId, TokenId};
use std::collections::HashMap;

/// A sequence that wants guesses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ask<'t> {
    pub(super) id: SeqId,
    /// All of it, the token that was chosen last included.
    pub(super) tokens: &'t [TokenId],
    /// Most tokens to guess.
    pub(super) room: usize,
}

/// See the [module](self).
pub(super) struct DraftModel {
    runner: Box<dyn StepRunner>,
    pool: BlockPool,
    seqs: HashMap<SeqId, DraftSeq>,
    most: usize,
    batch: StepBatch,
    wanted: Vec<Readback>,
    output: StepOutput,
}

/// What the small model knows of a sequence.
struct DraftSeq {
    table: BlockTable,
    /// Tokens whose keys and values are in `table`.
    computed: Vec<TokenId>,
    length: GuessLength,
}

/// Tokens that may come next in sequences.
pub(super) type Drafts = Vec<(SeqId, Vec<TokenId>)>;

/// A sequence that is guessed for in this step.
struct Guess {
    id: SeqId,
    wanted: usize,
    tokens: Vec<TokenId>,
}

impl DraftModel {
    /// A small model that guesses at most `most` tokens at a time.
    pub(super) fn new(runner: Box<dyn StepRunner>, most: usize) -> Self {
        Self {
            pool: BlockPool::of_groups(&runner.cache_groups()),
            runner,
            seqs: HashMap::new(),
            most,
            batch: StepBatch::default(),
            wanted: Vec::new(),
            output: StepOutput::default(),
        }
    }

    /// Guesses for all of `asks`; those that are not read to their end or have no room get none. Whether
    /// all that have room were read to their end, too.
    pub(super) fn guess(&mut self, asks: &[Ask<'_>]) -> Result<(bool, Drafts)> {
        let (ready, mut guesses) = self.read(asks)?;
        let mut rounds = 0..guesses.iter().map(|g| g.wanted).max().unwrap_or(0);
        // The first guess came with what was read.
        rounds.next();
        for _ in rounds {
            self.batch.clear();
            let more = |guess: &Guess| guess.tokens.len() < guess.wanted;
            for guess in guesses.iter().filter(|guess| more(guess)) {
                let (Some(seq), Some(last)) = (self.seqs.get_mut(&guess.id), guess.tokens.last())
                else {
                    continue;
                };
                push(&mut self.batch, seq, &[*last], LogitRows::Last)?;
            }
            self.step()?;
            let open = guesses.iter_mut().filter(|guess| more(guess));
            for (guess, (_, best)) in open.zip(self.output.tokens()) {
                guess.tokens.push(best.unwrap_or(0));
            }
        }
        let guesses = guesses.into_iter();
        let guesses = guesses.map(|guess| (guess.id, guess.tokens));
        Ok((ready, guesses.collect()))
    }

    /// Reads what is new of the sequences. Gives those that are read to their end, with a first guess, and
    /// whether these are all that have room.
    fn read(&mut self, asks: &[Ask<'_>]) -> Result<(bool, Vec<Guess>)> {
        let config = *self.runner.config();
        let (mut left, mut rows) = (config.max_tokens, config.max_logit_rows);
        let (mut all_ready, mut guesses) = (true, Vec::new());
        self.batch.clear();
        for ask in asks.iter().take(config.max_seqs) {
            let most = self.most;
            let seq = self.seqs.entry(ask.id).or_insert_with(|| DraftSeq {
                table: BlockTable::default(),
                computed: Vec::new(),
                length: GuessLength::new(most),
            });
            let known = seq.common(ask.tokens);
            seq.computed.truncate(known);
            let end = ask.tokens.len();
            let room = config.context.saturating_sub(end);
            let wanted = seq.length.next().min(ask.room).min(room);
            let part = left.min(end - known);
            if wanted == 0 {
                continue;
            }
            if part == 0 || rows == 0 {
                all_ready = false;
                continue;
            }
            // What was confirmed stays, so nothing before it is looked at again.
            self.pool.release_behind(&mut seq.table, known);
            let windowed = known + part + wanted;
            if !self.pool.grow_to(&mut seq.table, end + wanted, windowed) {
                // Others may need the blocks more; it is read again when there is room.
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
                &ask.tokens[known..known + part],
                logits,
            )?;
            if ready {
                rows -= 1;
                guesses.push(Guess {
                    id: ask.id,
                    wanted,
                    tokens: Vec::with_capacity(wanted),
                });
            }
        }
        self.step()?;
        for (guess, (_, best)) in guesses.iter_mut().zip(self.output.tokens()) {
            guess.tokens.push(best.unwrap_or(0));
        }
        Ok((all_ready, guesses))
    }

    /// Runs the batch and picks the likeliest token of each row.
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

    /// How the last guess for a sequence turned out.
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

impl DraftSeq {
    /// Tokens at the beginning of `tokens` that need not be read again; the last always is, as its logits
    /// are the first guess.
    fn common(&self, tokens: &[TokenId]) -> usize {
        let same = self.computed.iter().zip(tokens).take_while(|(a, b)| a == b);
        same.count().min(tokens.len() - 1)
    }
}

/// Adds tokens of a sequence to a batch, and to what is computed of it.
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
