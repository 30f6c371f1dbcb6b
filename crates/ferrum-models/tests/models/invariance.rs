//! Same prompt, same bits: whole or in chunks, alone or in a batch, paged or contiguous.

use crate::gpu::gpu;
use crate::support::{blocks, expected, fixtures, logits_in_chunks, logits_of, open, runner_in};
use ferrum_kernels::cpu::CpuBackend;
use ferrum_kernels::{
    Backend, BackendKvDtype, KvDtypeKind, KvF32, KvFp8, KvFp16, KvInt8, LlmBackend,
};
use ferrum_models::{
    Dequantized, KvLayout, LogitRows, Model, Moe, Readback, RowOutput, SeqStep, StepBatch,
    StepOutput, WeightForm,
};
use ferrum_types::TokenId;

const LAYOUTS: [KvLayout; 4] = [
    KvLayout::Contiguous,
    KvLayout::Paged { block_size: 1 },
    KvLayout::Paged { block_size: 7 },
    KvLayout::Paged { block_size: 32 },
];

/// A family each, a window and length-dependent RoPE; norms behind parts, parts in parallel, learned positions;
/// shared experts, latent attention, sinks.
const MODELS: [&str; 23] = [
    "llama3-tied",
    "mistral-window",
    "llama-dynamic",
    "qwen2",
    "qwen3",
    "qwen3-moe",
    "qwen3-moe-sparse",
    "gemma2",
    "gemma3",
    "phi3-longrope",
    "olmo3",
    "granite",
    "command-r7b",
    "gpt2",
    "qwen2-moe",
    "glm4-moe",
    "deepseek2-lite",
    "deepseek3",
    "gpt-oss",
    "gemma4",
    "gemma4-shared",
    "llama4",
    "command-r-plus",
];

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn check<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind, W: WeightForm<B>>(
    device: &B,
    name: &str,
) {
    let model = open(&fixtures().join(name));
    let tokens = expected(&fixtures().join(name).join("expected.safetensors")).tokens;
    let runner = |layout| runner_in::<B, K, W>(device, &model, layout);
    let whole = |layout| logits_in_chunks(&mut runner(layout), &tokens, &[96]);
    let base = bits(&whole(KvLayout::Contiguous));
    for layout in LAYOUTS {
        assert_eq!(
            bits(&whole(layout)),
            base,
            "{name}: {layout:?} and contiguous"
        );
        for chunks in [&[1usize][..], &[5], &[17, 1, 3]] {
            let mut runner = runner(layout);
            let found = logits_in_chunks(&mut runner, &tokens, chunks);
            assert_eq!(
                bits(&found),
                base,
                "{name}: chunks {chunks:?} with {layout:?}"
            );
        }
    }
    batch_of_four::<B, K, W>(device, &model, &tokens, &base);
}

/// Four sequences at different points of their lives in one step: a whole prompt, a chunk of one, a
/// decode, and one without tokens.
fn batch_of_four<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind, W: WeightForm<B>>(
    device: &B,
    model: &Model,
    tokens: &[TokenId],
    alone: &[u32],
) {
    let mut runner = runner_in::<B, K, W>(device, model, KvLayout::Paged { block_size: 8 });
    let vocab = model.spec.vocab_size;
    let pool = runner.pool().blocks;
    let tables: Vec<_> = (0..4).map(|slot| blocks(pool, slot)).collect();
    let n = tokens.len();
    let seq = |slot: usize, range: std::ops::Range<usize>, logits| SeqStep {
        tokens: &tokens[range.clone()],
        start: range.start,
        prompt_len: n,
        blocks: &tables[slot],
        hidden: false,
        logits,
        adapter: None,
    };
    let mut batch = StepBatch::default();
    batch.push(seq(1, 0..9, LogitRows::None)).unwrap();
    batch.push(seq(2, 0..n - 1, LogitRows::None)).unwrap();
    assert!(logits_of(&mut runner, &batch).is_empty());
    batch.clear();
    batch.push(seq(0, 0..n, LogitRows::All)).unwrap();
    batch.push(seq(3, 0..0, LogitRows::Last)).unwrap();
    batch.push(seq(1, 9..14, LogitRows::Last)).unwrap();
    batch.push(seq(2, n - 1..n, LogitRows::Last)).unwrap();
    let found = bits(&logits_of(&mut runner, &batch));
    let row = |bits: &[u32], row: usize| bits[row * vocab..(row + 1) * vocab].to_vec();
    assert_eq!(found[..n * vocab], *alone, "the whole prompt in a batch");
    assert_eq!(row(&found, n), row(alone, 13), "a chunk in a batch");
    assert_eq!(row(&found, n + 1), row(alone, n - 1), "a decode in a batch");
    // The same step once more, and of each row something else is read.
    let kinds = [Readback::Logits, Readback::GREEDY, Readback::Nothing];
    let wanted: Vec<_> = (0..n + 2).map(|row| kinds[row % 3]).collect();
    let mut output = StepOutput::default();
    runner.run(&batch, &wanted, &mut output).unwrap();
    for (index, wanted) in wanted.iter().enumerate() {
        let expected = row(&found, index);
        let best = |bits: &[u32]| {
            let logits = bits.iter().map(|&bits| f32::from_bits(bits)).enumerate();
            let better = |a: (usize, f32), b: (usize, f32)| if b.1 > a.1 { b } else { a };
            logits.reduce(better).unwrap().0 as TokenId
        };
        match output.row(index) {
            RowOutput::Logits(logits) => assert_eq!(bits(logits), expected, "row {index}"),
            RowOutput::Token(token, _) => assert_eq!(token, best(&expected), "row {index}"),
            other => assert_eq!((other, *wanted), (RowOutput::Nothing, Readback::Nothing)),
        }
    }
}

#[test]
fn gpu_results_do_not_depend_on_company() {
    if let Some(device) = gpu() {
        check::<_, KvF32, Dequantized>(&device, "mistral-window");
        check::<_, KvFp16, Dequantized>(&device, "qwen3");
    }
}

#[test]
fn cpu_results_do_not_depend_on_company() {
    let device = CpuBackend::open(0).unwrap();
    for name in MODELS {
        check::<_, KvF32, Moe<Dequantized>>(&device, name);
        check::<_, KvFp16, Moe<Dequantized>>(&device, name);
    }
    for name in ["mistral-window", "qwen3"] {
        check::<_, KvFp8, Dequantized>(&device, name);
        check::<_, KvInt8, Dequantized>(&device, name);
    }
}
