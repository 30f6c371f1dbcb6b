//! LoRA adapters, with what PEFT makes of them.

use super::{blocks, fixtures, logits_of, open, read_expected, runner_in};
use ferrum_formats::LoraFolder;
use ferrum_kernels::{BackendKvDtype, KvF32, LlmBackend};
use ferrum_models::{Dequantized, KvLayout, LogitRows, ModelRunner, SeqStep, StepBatch};
use ferrum_types::{AdapterId, StateSlot, TokenId};
use std::path::PathBuf;

/// Adapter and the model that it was made for.
pub(crate) const ADAPTERS: [(&str, &str); 6] = [
    ("llama-all", "llama3-tied"),
    ("llama-up", "llama3-tied"),
    ("qwen3-patterns", "qwen3"),
    ("phi3-joined", "phi3"),
    ("lfm2-convolutions", "lfm2"),
    ("qwen35-hybrid", "qwen35"),
];

pub(crate) const LAYOUT: KvLayout = KvLayout::Paged { block_size: 8 };

pub(crate) fn folder(name: &str) -> PathBuf {
    fixtures().join("../lora").join(name)
}

pub(crate) fn adapter(name: &str) -> LoraFolder {
    LoraFolder::open(folder(name)).unwrap_or_else(|e| panic!("{e}"))
}

pub(crate) fn runner<B: LlmBackend + BackendKvDtype<KvF32>>(
    device: &B,
    model: &str,
) -> ModelRunner<B, KvF32> {
    let model = open(&fixtures().join(model));
    runner_in::<B, KvF32, Dequantized>(device, &model, LAYOUT)
}

/// Logits of all positions of several sequences `(tokens, adapter)` in one batch after the other:
/// `chunk` tokens of each at a time.
pub(crate) fn logits<B: LlmBackend + BackendKvDtype<KvF32>>(
    runner: &mut ModelRunner<B, KvF32>,
    seqs: &[(&[TokenId], Option<AdapterId>)],
    chunk: usize,
) -> Vec<Vec<f32>> {
    let (vocab, pool) = (runner.spec().vocab_size, runner.pool().blocks);
    let tables: Vec<_> = (0..seqs.len()).map(|slot| blocks(pool, slot)).collect();
    let mut out = vec![Vec::new(); seqs.len()];
    let longest = seqs.iter().map(|(tokens, _)| tokens.len()).max().unwrap();
    for start in (0..longest).step_by(chunk) {
        let mut batch = StepBatch::default();
        for (slot, ((tokens, adapter), blocks)) in seqs.iter().zip(&tables).enumerate() {
            let end = (start + chunk).min(tokens.len());
            batch
                .push(SeqStep {
                    tokens: &tokens[start.min(end)..end],
                    start: start.min(end),
                    prompt_len: tokens.len(),
                    blocks,
                    logits: LogitRows::All,
                    hidden: false,
                    adapter: *adapter,
                })
                .unwrap();
            if runner.state_slots().is_some() {
                batch.add_state(StateSlot(slot as u32));
            }
        }
        let rows = logits_of(runner, &batch);
        let mut rest = rows.as_slice();
        for (seq, out) in out.iter_mut().enumerate() {
            let (mine, others) = rest.split_at(batch.rows(seq).len() * vocab);
            out.extend_from_slice(mine);
            rest = others;
        }
    }
    out
}

/// Logits `[tokens, vocab]` of an adapter's text.
pub(crate) struct WithAndWithout {
    pub(crate) adapted: Vec<f32>,
    pub(crate) plain: Vec<f32>,
    pub(crate) vocab: usize,
}

/// Logits of an adapter's text with the adapter and without, on a model in the folder of fixtures: while it is loaded, a
/// sequence that does not name it has the bits that it had before.
pub(crate) fn with_and_without<B: LlmBackend + BackendKvDtype<KvF32>>(
    device: &B,
    name: &str,
    model: &str,
) -> WithAndWithout {
    let (tokens, _) = read_expected(&folder(name).join("expected.safetensors"));
    let mut runner = runner(device, model);
    let of = |runner: &mut _, adapter| logits(runner, &[(&tokens, adapter)], 96).remove(0);
    let plain = of(&mut runner, None);
    let id = AdapterId(7);
    runner.load_adapter(id, &adapter(name)).unwrap();
    let adapted = of(&mut runner, Some(id));
    assert!(of(&mut runner, None) == plain, "{name} on {model}");
    assert!(runner.unload_adapter(id) && !runner.unload_adapter(id));
    WithAndWithout {
        adapted,
        plain,
        vocab: runner.spec().vocab_size,
    }
}

/// Sequences of two adapters and of none in these orders, and in chunks of so many tokens, have the bits that each has
/// alone. Returns the logits of "llama-all" for its text.
pub(crate) fn check_together<B: LlmBackend + BackendKvDtype<KvF32>>(
    device: &B,
    orders: &[[usize; 4]],
    chunks: &[usize],
) -> Vec<f32> {
    let mut runner = runner(device, "llama3-tied");
    let (tokens, _) = read_expected(&folder("llama-all").join("expected.safetensors"));
    let (all, up) = (AdapterId(1), AdapterId(2));
    runner.load_adapter(all, &adapter("llama-all")).unwrap();
    runner.load_adapter(up, &adapter("llama-up")).unwrap();
    let seqs = [
        (&tokens[..], Some(all)),
        (&tokens[3..20], None),
        (&tokens[1..], Some(up)),
        (&tokens[2..25], Some(all)),
    ];
    let mut alone: Vec<_> = seqs
        .iter()
        .map(|&seq| logits(&mut runner, &[seq], 96).remove(0))
        .collect();
    assert_ne!(alone[0], alone[2]);
    for order in orders {
        for &chunk in chunks {
            let found = logits(&mut runner, &order.map(|i| seqs[i]), chunk);
            for (found, &i) in found.iter().zip(order) {
                assert!(
                    *found == alone[i],
                    "sequence {i} of {order:?}, chunks of {chunk}"
                );
            }
        }
    }
    alone.swap_remove(0)
}
