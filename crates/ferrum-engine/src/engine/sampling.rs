//! Choosing tokens for several sequences at once: each reads a whole vocabulary of logits, and meanwhile
//! the device waits.

use super::step_loop::StepLoop;
use crate::scheduler::StepPlan;
use ferrum_types::SeqId;
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use std::collections::HashMap;

/// Logits of a step, of all rows together, below which other threads are not worth waking.
const WORTH_THREADS: usize = 1 << 18;

impl StepLoop<'_> {
    /// Chooses for the sequences whose last row gives their next token, on all cores. What is not chosen
    /// here is chosen when it is its turn: when there is little to read, and with drafts, whose
    /// later rows are worth a look only after the earlier ones.
    pub(super) fn choose_ahead(&mut self, plan: &StepPlan) {
        self.chosen.clear();
        let (rows, read) = (plan.rows(), self.output.logits().len());
        if rows < 2 || read < WORTH_THREADS {
            return;
        }
        let mut row = 0;
        let mut last_rows: HashMap<SeqId, usize> = HashMap::new();
        for work in plan.work() {
            row += work.rows();
            if work.gives_token && work.draft == 0 {
                last_rows.insert(work.seq, row - 1);
            }
        }
        let mut places: Vec<_> = (0..rows).map(|_| None).collect();
        for (row, logits) in self.output.logit_rows_mut() {
            places[row] = Some(logits);
        }
        let mut tasks = Vec::with_capacity(last_rows.len());
        for (id, answer) in &mut self.answers {
            let row = last_rows.get(id).copied();
            let place = row.and_then(|row| Some((row, places.get_mut(row)?.take()?)));
            let (Some((row, logits)), Some(seq)) = (place, self.scheduler.sequence(*id)) else {
                continue;
            };
            if answer.max_tokens > 0 {
                tasks.push((row, answer, logits, seq.tokens()));
            }
        }
        let chosen: Vec<_> = tasks
            .into_par_iter()
            .map(|(row, answer, logits, tokens)| (row, answer.choose(logits, tokens)))
            .collect();
        self.chosen.resize_with(rows, || None);
        for (row, chosen) in chosen {
            self.chosen[row] = Some(chosen);
        }
    }
}
