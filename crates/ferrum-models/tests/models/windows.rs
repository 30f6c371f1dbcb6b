//! Runners whose layers differ in window, with tables that have given back what is behind it: against `transformers`,
//! and to the bit against a runner that keeps everything.

use crate::support::{
    config, exact_cpu, expected, fixtures, logits_in_chunks, logits_in_groups, max_difference,
    open, runner_in,
};
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_kernels::{Backend, BackendKvDtype, KvF32, LlmBackend};
use ferrum_models::{
    AttentionSpec, CacheGroup, Dequantized, KvLayout, LayerCache, LogitRows, Readback, RowOutput,
    SeqStep, StepBatch, StepOutput, WeightPolicy, memory_plan,
};
use ferrum_types::{BlockId, TokenId};

fn check<B: LlmBackend + BackendKvDtype<KvF32>>(device: &B) {
    for (fixture, windows) in [
        ("qwen2-window", vec![None, Some(6)]),
        ("mistral-window", vec![Some(7)]),
    ] {
        let dir = fixtures().join(fixture);
        let (model, expected) = (open(&dir), expected(&dir.join("expected.safetensors")));
        let grouped = KvLayout::Grouped { block_size: 4 };
        let whole = KvLayout::Paged { block_size: 4 };
        let mut runner = runner_in::<_, KvF32, Dequantized>(device, &model, grouped);
        let groups = runner.cache_groups().iter();
        assert_eq!(
            groups.map(|group| group.window).collect::<Vec<_>>(),
            windows
        );
        let mut plain = runner_in::<_, KvF32, Dequantized>(device, &model, whole);
        let all = logits_in_chunks(&mut plain, &expected.tokens, &[usize::MAX]);
        for chunk in [1, 5, expected.tokens.len()] {
            let found = logits_in_groups(&mut runner, &expected.tokens, chunk);
            let difference = max_difference(&found, &expected.logits);
            assert!(
                difference <= 1e-4,
                "{fixture} in chunks of {chunk}: {difference}"
            );
            let bits = |logits: &[f32]| logits.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&found), bits(&all), "{fixture} in chunks of {chunk}");
        }
        // What was chosen greedily, of the prompt's first tokens.
        let mut tokens = expected.tokens[..8].to_vec();
        tokens.extend(&expected.greedy);
        let found = logits_in_groups(&mut runner, &tokens, 3);
        let rows = found.chunks_exact(model.spec.vocab_size).skip(7);
        let best = rows.map(|row| {
            let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
            best.unwrap().0 as TokenId
        });
        let best: Vec<_> = best.take(expected.greedy.len()).collect();
        assert_eq!(best, expected.greedy, "{fixture}");
    }
}

#[test]
fn the_reference_sees_nothing_behind_a_window() {
    check(&ReferenceBackend::open(0).unwrap());
}

#[test]
fn the_cpu_sees_nothing_behind_a_window() {
    check(&exact_cpu());
}

#[test]
fn tables_that_lack_a_block_are_refused() {
    let model = open(&fixtures().join("qwen2-window"));
    let layout = KvLayout::Grouped { block_size: 4 };
    let device = ReferenceBackend::open(0).unwrap();
    let mut runner = runner_in::<_, KvF32, Dequantized>(&device, &model, layout);
    let none = BlockId::RELEASED;
    let ids = |ids: &[u32]| ids.iter().map(|&id| BlockId(id)).collect::<Vec<_>>();
    // Ten tokens, of which the last is new; it sees those from 4 on.
    let mut run = |whole: Vec<BlockId>, window: Option<Vec<BlockId>>| {
        let mut batch = StepBatch::default();
        let step = SeqStep {
            tokens: &[1],
            start: 9,
            prompt_len: 10,
            blocks: &whole,
            hidden: false,
            logits: LogitRows::Last,
            adapter: None,
        };
        batch.push(step).unwrap();
        if let Some(window) = window {
            batch.add_table(1, &window).unwrap();
        }
        let mut output = StepOutput::default();
        let done = runner.run(&batch, &[Readback::GREEDY], &mut output);
        done.map(|()| assert!(matches!(output.row(0), RowOutput::Token(..))))
            .map_err(|error| error.to_string())
    };
    let whole = ids(&[0, 1, 2]);
    run(whole.clone(), Some(vec![none, BlockId(0), BlockId(1)])).unwrap();
    for (whole, window, words) in [
        (whole.clone(), None, "cache group 1 has block tables of 0"),
        (
            whole.clone(),
            Some(ids(&[0, 1])),
            "has 2 KV blocks and needs 3",
        ),
        (
            whole.clone(),
            Some(vec![none, none, BlockId(1)]),
            "is outside the pool",
        ),
        (
            whole.clone(),
            Some(ids(&[9999, 1, 2])),
            "KV block 9999 is outside",
        ),
        (
            vec![none, BlockId(0), BlockId(1)],
            Some(whole),
            "is outside the pool",
        ),
    ] {
        let refused = run(whole, window).unwrap_err();
        assert!(refused.contains(words), "{refused}");
    }
}

#[test]
fn pools_are_as_large_as_windows_and_heads_need() {
    let mut model = open(&fixtures().join("qwen2-window"));
    let whole = config(KvLayout::Paged { block_size: 4 });
    let grouped = config(KvLayout::Grouped { block_size: 4 });
    let sizes = |groups: Vec<CacheGroup>| -> Vec<_> {
        let of = |g: CacheGroup| (g.layers, g.window, g.blocks);
        groups.into_iter().map(of).collect()
    };
    let one = sizes(whole.cache_groups(&model.spec));
    assert_eq!(one, [(vec![0, 1, 2], None, 128)]);
    // Four sequences of three blocks and two more, and twice 96 tokens.
    let two = sizes(grouped.cache_groups(&model.spec));
    assert_eq!(two, [(vec![0], None, 128), (vec![1, 2], Some(6), 68)]);
    assert_eq!(grouped.cache_tokens(), whole.cache_tokens());

    // A token is 2 · 2 heads of 8 elements of 4 bytes.
    let plan = |config| {
        memory_plan::<KvF32>(
            &model,
            WeightPolicy::of::<ReferenceBackend, Dequantized>(),
            config,
        )
    };
    let (kept, less) = (plan(&whole), plan(&grouped));
    assert_eq!(
        (kept.kv, kept.kv_per_token, kept.kv_windows),
        (3 * 512 * 128, 384, 0)
    );
    assert_eq!(
        (less.kv_per_token, less.kv_windows),
        (128, 2 * 68 * 4 * 128)
    );
    assert_eq!(less.kv, 512 * 128 + less.kv_windows);

    let AttentionSpec::Gqa(gqa) = &mut model.spec.layers[2].attention else {
        panic!("a layer without heads");
    };
    (gqa.kv_heads, gqa.sliding_window) = (1, Some(128));
    model.spec.validate().unwrap();
    let found = grouped.layer_caches(&model.spec).into_iter();
    let found = found.map(|cache| match cache {
        LayerCache::Pool { group, shape } => (group, shape.blocks, shape.kv_heads),
        other => panic!("{other:?}"),
    });
    // A window of the whole context is none.
    let expected = [(0, 128, 2), (1, 68, 2), (0, 128, 1)];
    assert_eq!(found.collect::<Vec<_>>(), expected);
}
