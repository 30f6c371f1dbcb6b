//! Decoders with bidirectional attention: their states are those of `transformers`, whole sequences only.

use crate::gpu::gpu;
use crate::support::bidirectional::{GEMMA, LAYOUT, QWEN, difference, folder, texts};
use crate::support::{blocks, exact_cpu, open, runner_in};
use ferrum_conformance::minimal::Minimal;
use ferrum_kernels::KvF32;
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_models::{
    Dequantized, LogitRows, Pooling, SeqStep, StatedPooling, StepBatch, StepOutput,
};

#[test]
fn states_and_embeddings_are_those_of_transformers() {
    for name in [GEMMA, QWEN] {
        let model = open(&folder(name));
        assert!(!model.spec.is_causal() && !model.generates());
        let pooling = StatedPooling::of(&model.source).unwrap();
        assert_eq!(pooling, StatedPooling::Known(Pooling::Mean));
        let found = difference(&ReferenceBackend::new(), name);
        assert!(found <= 5e-5, "{name} on reference: {found}");
        let found = difference(&exact_cpu(), name);
        assert!(found <= 5e-5, "{name} on cpu: {found}");
        if let Some(device) = gpu() {
            let found = difference(&device, name);
            assert!(found <= 5e-5, "{name} on a GPU: {found}");
        }
        // Activations of eight bits of precision.
        let found = difference(&Minimal::default(), name);
        assert!(found <= 0.2 && found > 1e-4, "{name} in bf16: {found}");
    }
}

#[test]
fn a_part_of_a_sequence_is_refused() {
    let model = open(&folder(GEMMA));
    let mut runner = runner_in::<_, KvF32, Dequantized>(&exact_cpu(), &model, LAYOUT);
    let (tokens, _) = texts(GEMMA).swap_remove(0);
    let blocks = blocks(runner.pool().blocks, 0);
    let mut run = |part: std::ops::Range<usize>| {
        let step = SeqStep {
            tokens: &tokens[part.clone()],
            start: part.start,
            prompt_len: tokens.len(),
            blocks: &blocks,
            logits: LogitRows::All,
            hidden: true,
            adapter: None,
        };
        let mut batch = StepBatch::default();
        batch.push(step).unwrap();
        runner.run(&batch, &[], &mut StepOutput::default())
    };
    for part in [0..3, 2..tokens.len(), 1..2] {
        let error = run(part.clone()).unwrap_err().to_string();
        assert!(error.contains("expected all"), "{part:?}: {error}");
    }
    run(0..tokens.len()).unwrap();
}
