//! Samples tokens for several sequences in parallel: each reads a whole vocabulary of logits while the device waits.

use super::state::StepLoop;
use crate::scheduler::StepPlan;
use ferrum_types::SeqId;
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use std::collections::HashMap;

/// Fewest logits of a step, of all rows together, for which several threads sample.
const MIN_PARALLEL_LOGITS: usize = 1 << 18;

impl StepLoop<'_> {
    /// Samples on all cores for the sequences whose last row gives their next token. The remaining rows are sampled one by
    /// one later: steps with few logits, and drafts, whose later rows are needed only if the earlier ones are accepted.
    pub(super) fn choose_ahead(&mut self, plan: &StepPlan) {
        self.chosen.clear();
        let (rows, read) = (plan.rows(), self.output.logits().len());
        if rows < 2 || read < MIN_PARALLEL_LOGITS {
            return;
        }
        let mut row = 0;
        let mut last_rows: HashMap<SeqId, usize> = HashMap::new();
        for scheduled in plan.sequences() {
            row += scheduled.rows();
            if scheduled.gives_token && scheduled.draft == 0 {
                last_rows.insert(scheduled.seq, row - 1);
            }
        }
        let mut by_row: Vec<_> = (0..rows).map(|_| None).collect();
        for (row, logits) in self.output.logit_rows_mut() {
            by_row[row] = Some(logits);
        }
        let mut tasks = Vec::with_capacity(last_rows.len());
        for (id, choice) in &mut self.choices {
            let row = last_rows.get(id).copied();
            let row = row.and_then(|row| Some((row, by_row.get_mut(row)?.take()?)));
            let (Some((row, logits)), Some(seq)) = (row, self.scheduler.sequence(*id)) else {
                continue;
            };
            if choice.max_tokens > 0 {
                tasks.push((row, choice, logits, seq.tokens()));
            }
        }
        let chosen: Vec<_> = tasks
            .into_par_iter()
            .map(|(row, choice, logits, tokens)| (row, choice.choose(logits, tokens)))
            .collect();
        self.chosen.resize_with(rows, || None);
        for (row, chosen) in chosen {
            self.chosen[row] = Some(chosen);
        }
    }
}
