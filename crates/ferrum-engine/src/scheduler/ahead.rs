//! Steps in flight: what the device has begun, and the step after it.
//!
//! Steps run in the order in which they began, so what one writes the next one reads. Their tokens come later. A
//! step that is planned ahead takes for a token that is due whatever a row of the step before will choose, and
//! everything else as it will be then, for lengths are known. Who ends earlier (a stop token, a cancelled request)
//! is computed once more for nothing.

use super::images::keys;
use super::states::Keeping;
use super::{Scheduler, StepPlan};
use crate::pool::BlockTable;
use ferrum_models::{SeqStep, StepBatch};
use ferrum_types::{Result, SeqId};

impl Scheduler {
    /// Plans the step after the one in flight, of which every row that gives a token chooses it by itself. Whether
    /// there is such a step: not when nobody would be in it, and not when somebody had to lose blocks for it, for
    /// the step in flight uses them. The next [`schedule`](Self::schedule) decides then.
    pub fn schedule_ahead(&mut self, plan: &mut StepPlan) -> bool {
        plan.clear();
        if !self.grow_ahead() || !self.admit_ahead() {
            return false;
        }
        self.share_out(plan);
        let planned = !plan.work().is_empty();
        self.counters.steps += u64::from(planned);
        planned
    }

    /// Whether a sequence goes on after the tokens that are due, as far as lengths say: only a token can end it.
    pub fn goes_on(&self, id: SeqId) -> bool {
        let seq = self.seqs.get(&id);
        seq.is_some_and(|seq| seq.goes_on(self.capacity()))
    }

    /// Fills `batch` with the tokens and tables of the plan that was made last, and records that it begins.
    ///
    /// # Errors
    /// `InvalidArgument` when a length does not fit a batch.
    pub fn begin(&mut self, plan: &StepPlan, batch: &mut StepBatch) -> Result<()> {
        batch.clear();
        self.begun += 1;
        batch.state_inits.append(&mut self.state_inits);
        let keep_points = self.keep_points();
        let mut keeping = Vec::new();
        let mut row = 0;
        for work in plan.work() {
            row += work.rows();
            let Some(seq) = self.seqs.get_mut(&work.seq) else {
                continue;
            };
            let end = work.start + work.len - work.draft;
            let is_due = end > seq.tokens.len();
            let drafted;
            let tokens = match work.draft {
                // Only the device knows it.
                0 if is_due => &[0],
                0 => &seq.tokens[work.start..end],
                n => {
                    drafted = [&seq.tokens[work.start..end], &seq.draft[..n]].concat();
                    &drafted[..]
                }
            };
            batch.push(SeqStep {
                tokens,
                start: work.start,
                prompt_len: seq.prompt_len,
                blocks: seq.table.blocks(),
                hidden: work.hidden,
                logits: work.logits,
                adapter: seq.salt.adapter,
            })?;
            for group in 1..seq.table.groups() {
                batch.add_table(group, seq.table.group(group))?;
            }
            for image in seq.images.iter().flat_map(|images| &images.spans) {
                batch.add_image(image)?;
            }
            if let Some(slot) = seq.table.state() {
                batch.add_state(slot);
                let keeps = keep_points.is_some_and(|points| points.keeps(end, seq));
                if let Some(to) = keeps.then(|| self.pool.begin_keep()).flatten() {
                    batch.state_keeps.push((slot, to));
                    keeping.push(Keeping {
                        seq: work.seq,
                        slot: to,
                        tokens: end,
                    });
                }
            }
            if is_due {
                batch.set_last_pending(seq.choice_row);
            }
            seq.draft.truncate(work.draft);
            seq.computed = end;
            seq.last_step = self.begun;
            if work.gives_token {
                seq.due += 1;
                seq.choice_row = (row - 1) as u32;
            }
        }
        if self.pool.has_states() {
            self.keeping.push_back(keeping);
        }
        Ok(())
    }

    /// Records that the plan that began first of those in flight was carried out: its keys and values are in the
    /// pool, and the tokens that it gives can be appended.
    pub fn commit(&mut self, plan: &StepPlan) {
        self.committed += 1;
        self.free_held();
        for work in plan.work() {
            // Whoever was removed meanwhile has no blocks to speak of.
            let Some(seq) = self.seqs.get_mut(&work.seq) else {
                continue;
            };
            let end = work.start + work.len - work.draft;
            seq.prompt_done |= end >= seq.prompt_len;
            if let Some(from) = &mut seq.logits_from {
                *from = (*from).max(end);
            }
            let mut replaced = BlockTable::default();
            let computed = &keys(&seq.images, &seq.tokens)[..end];
            self.pool
                .register(&mut seq.table, &seq.salt, computed, &mut replaced);
            // A step in flight begins behind this one, so it sees none of them either.
            self.pool.release_behind(&mut seq.table, end);
            let last_step = seq.last_step;
            self.free(last_step, replaced);
        }
        self.end_keeps();
    }

    /// Gives blocks back that are used up to a step: now, or when it is committed.
    pub(super) fn free(&mut self, last_step: u64, mut table: BlockTable) {
        if last_step > self.committed && !table.is_empty() {
            self.held.push((last_step, table));
        } else {
            self.pool.release(&mut table);
        }
    }

    fn free_held(&mut self) {
        let (pool, committed) = (&mut self.pool, self.committed);
        self.held.retain_mut(|(step, table)| {
            let keep = *step > committed;
            if !keep {
                pool.release(table);
            }
            keep
        });
    }

    /// Every running sequence gets blocks for all its tokens, those that are due included; whether there were
    /// enough.
    fn grow_ahead(&mut self) -> bool {
        let capacity = self.capacity();
        let ids = self.running.values();
        ids.copied().all(|id| {
            let Some(seq) = self.seqs.get_mut(&id).filter(|s| s.goes_on(capacity)) else {
                return true;
            };
            seq.grow(&mut self.pool, seq.tokens.len() + seq.due)
        })
    }

    /// Lets sequences in by rank until one does not fit; whether nobody may be preempted for that one.
    fn admit_ahead(&mut self) -> bool {
        self.reading = false;
        let mut next = self.next_waiting(None);
        while let Some((rank, id)) = next {
            if self.is_ready(id) && !self.admit_one(id) {
                return self.victims_for(id).is_none();
            }
            next = self.next_waiting(Some(rank));
        }
        true
    }
}
