//! Asynchronous scheduling: plans the next step while one is in flight.
//!
//! Steps run in the order in which they began, so a step reads what the one before it wrote. Tokens not yet known refer
//! to rows of the running step; lengths are known. A sequence that ends meanwhile (a stop token, a cancelled request) is
//! computed once too often and its output dropped.

use super::images::keys;
use super::states::PendingCheckpoint;
use super::{Scheduler, StepPlan};
use crate::pool::BlockTable;
use ferrum_models::{SeqStep, StateInit, StepBatch};
use ferrum_types::{Result, SeqId};

impl Scheduler {
    /// Plans the step after the one in flight, of which the device samples every row that gives a token. Returns whether
    /// there is such a step: not if it would be empty, and not if a sequence would have to be preempted, as the step in
    /// flight uses its blocks. The next [`schedule`](Self::schedule) decides then.
    pub fn schedule_ahead(&mut self, plan: &mut StepPlan) -> bool {
        plan.clear();
        if !self.grow_ahead() || !self.admit_ahead() {
            return false;
        }
        self.allocate_budget(plan);
        let planned = !plan.sequences().is_empty();
        self.counters.steps += u64::from(planned);
        planned
    }

    /// Whether a sequence continues after its pending tokens, according to the length limits: only a token can end it.
    pub fn goes_on(&self, id: SeqId) -> bool {
        let seq = self.seqs.get(&id);
        seq.is_some_and(|seq| seq.goes_on(self.capacity()))
    }

    /// Fills `batch` with the tokens and tables of the last plan, and records that its step begins.
    ///
    /// # Errors
    /// `InvalidArgument` when a length does not fit a batch.
    pub fn begin(&mut self, plan: &StepPlan, batch: &mut StepBatch) -> Result<()> {
        batch.clear();
        self.begun += 1;
        batch.state_inits.append(&mut self.state_inits);
        let policy = self.checkpoint_policy();
        let mut pending = Vec::new();
        let mut row = 0;
        for scheduled in plan.sequences() {
            row += scheduled.rows();
            let Some(seq) = self.seqs.get_mut(&scheduled.seq) else {
                continue;
            };
            let end = scheduled.start + scheduled.len - scheduled.draft;
            let is_pending = end > seq.tokens.len();
            let drafted;
            let tokens = match scheduled.draft {
                // The device fills in the token.
                0 if is_pending => &[0],
                0 => &seq.tokens[scheduled.start..end],
                n => {
                    drafted = [&seq.tokens[scheduled.start..end], &seq.draft[..n]].concat();
                    &drafted[..]
                }
            };
            batch.push(SeqStep {
                tokens,
                start: scheduled.start,
                prompt_len: seq.prompt_len,
                blocks: seq.table.blocks(),
                hidden: scheduled.hidden,
                logits: scheduled.logits,
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
                if let Some(saved) = seq.table.saved_state() {
                    let from = Some(slot);
                    batch.state_inits.push(StateInit { slot: saved, from });
                    seq.saved_at = scheduled.start;
                }
                // Behind a draft the state is not that after its known tokens.
                let due = policy.is_some_and(|policy| policy.applies(end, seq));
                let due = due && scheduled.draft == 0;
                if let Some(to) = due.then(|| self.pool.begin_checkpoint()).flatten() {
                    batch.state_keeps.push((slot, to));
                    pending.push(PendingCheckpoint {
                        seq: scheduled.seq,
                        slot: to,
                        tokens: end,
                    });
                }
            }
            if is_pending {
                batch.set_last_pending(seq.sampled_row);
            }
            seq.draft.truncate(scheduled.draft);
            seq.computed = end;
            seq.last_step = self.begun;
            if scheduled.gives_token {
                seq.pending_tokens += 1;
                seq.sampled_row = (row - 1) as u32;
            }
        }
        if self.pool.has_states() {
            self.pending_checkpoints.push_back(pending);
        }
        Ok(())
    }

    /// Records that the oldest step in flight was computed: its keys and values are in the pool, and the tokens that it
    /// gives can be appended.
    pub fn commit(&mut self, plan: &StepPlan) {
        self.committed += 1;
        self.free_held();
        for scheduled in plan.sequences() {
            // A sequence that was removed meanwhile has no blocks.
            let Some(seq) = self.seqs.get_mut(&scheduled.seq) else {
                continue;
            };
            let end = scheduled.start + scheduled.len - scheduled.draft;
            seq.prompt_done |= end >= seq.prompt_len;
            if let Some(from) = &mut seq.logits_from {
                *from = (*from).max(end);
            }
            // After a wrong draft a sequence with a state computes this step's tokens again, so no other may have their blocks.
            let settled = match seq.table.saved_state() {
                Some(_) => scheduled.start,
                None => end,
            };
            let mut replaced = BlockTable::default();
            // Keys of a whole prompt are of use to no other.
            if !seq.whole {
                let computed = &keys(&seq.images, &seq.tokens)[..settled];
                self.pool
                    .register(&mut seq.table, &seq.salt, computed, &mut replaced);
            }
            // A step in flight starts after this one, so it does not read them either.
            self.pool.release_before_window(&mut seq.table, settled);
            let last_step = seq.last_step;
            self.free(last_step, replaced);
        }
        self.commit_checkpoints();
    }

    /// Releases blocks that are used up to a step: now, or when it is committed.
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

    /// Gives every running sequence blocks for all its tokens, pending ones included. Returns whether there were enough.
    fn grow_ahead(&mut self) -> bool {
        let capacity = self.capacity();
        let ids = self.running.values();
        ids.copied().all(|id| {
            let Some(seq) = self.seqs.get_mut(&id).filter(|s| s.goes_on(capacity)) else {
                return true;
            };
            seq.grow(&mut self.pool, seq.tokens.len() + seq.pending_tokens)
        })
    }

    /// Admits sequences by rank until one does not fit. Returns whether no sequence may be preempted for that one.
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
