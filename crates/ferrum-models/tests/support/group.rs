//! Groups of ranks with a cache of f32: their logits, and the tokens that they choose.

use super::{blocks, config};
use ferrum_kernels::{KvF32, LlmBackend};
use ferrum_models::{
    KvLayout, LogitRows, Model, Readback, RunnerGroup, SeqStep, StepBatch, StepOutput, WeightForm,
};
use ferrum_types::{AdapterId, StateSlot, TokenId};

pub(crate) const LAYOUT: KvLayout = KvLayout::Paged { block_size: 8 };

pub(crate) fn group<B: LlmBackend, W: WeightForm<B>>(
    devices: &[B],
    model: &Model,
) -> RunnerGroup<B> {
    RunnerGroup::load::<KvF32, W>(devices, model, config(LAYOUT), &mut |_, _| ()).unwrap()
}

pub(crate) fn step(tokens: &[TokenId], start: usize, prompt_len: usize, pool: usize) -> StepBatch {
    adapted_step(tokens, start, prompt_len, (pool, None))
}

fn adapted_step(
    tokens: &[TokenId],
    start: usize,
    prompt_len: usize,
    (pool, adapter): (usize, Option<AdapterId>),
) -> StepBatch {
    let mut batch = StepBatch::default();
    batch
        .push(SeqStep {
            tokens,
            start,
            prompt_len,
            blocks: &blocks(pool, 1),
            hidden: false,
            logits: LogitRows::All,
            adapter,
        })
        .unwrap();
    batch
}

/// The state slot of the only sequence of a batch, if it needs one.
fn add_state<B: LlmBackend>(group: &RunnerGroup<B>, batch: &mut StepBatch) {
    if group.state_slots().is_some() {
        batch.add_state(StateSlot(1));
    }
}

/// Logits of all positions of `tokens`, `chunk` of them in a step.
pub(crate) fn logits<B: LlmBackend>(
    group: &mut RunnerGroup<B>,
    (tokens, adapter): (&[TokenId], Option<AdapterId>),
    chunk: usize,
) -> Vec<f32> {
    let (pool, mut out) = (group.pool().blocks, Vec::new());
    for (i, part) in tokens.chunks(chunk).enumerate() {
        let mut batch = adapted_step(part, i * chunk, tokens.len(), (pool, adapter));
        add_state(group, &mut batch);
        let (mut output, wanted) = (StepOutput::default(), vec![Readback::Logits; part.len()]);
        group.run(&batch, &wanted, &mut output).unwrap();
        out.extend_from_slice(output.logits());
    }
    out
}

/// Greedy tokens behind a prompt.
pub(crate) fn greedy<B: LlmBackend>(
    group: &mut RunnerGroup<B>,
    prompt: &[TokenId],
    count: usize,
) -> Vec<TokenId> {
    let pool = group.pool().blocks;
    let (mut next, mut start, mut found) = (prompt.to_vec(), 0, Vec::new());
    while found.len() < count {
        let mut batch = step(&next, start, prompt.len(), pool);
        add_state(group, &mut batch);
        let mut wanted = vec![Readback::Nothing; next.len()];
        *wanted.last_mut().unwrap() = Readback::GREEDY;
        let mut output = StepOutput::default();
        group.run(&batch, &wanted, &mut output).unwrap();
        start += next.len();
        next = output
            .tokens()
            .filter_map(|(_, token)| token.ok())
            .collect();
        assert_eq!(next.len(), 1);
        found.extend_from_slice(&next);
    }
    found
}
