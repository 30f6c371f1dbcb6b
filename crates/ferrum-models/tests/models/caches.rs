//! Layers whose caches differ: values of another width than keys, keys and values that are those of an earlier layer, and
//! recurrent states. Held against f64 loops, and to the bit against other chunks, batches, layouts, stages, moved blocks
//! and kept states.

use crate::support::naive::{Attention, Naive, PLAIN, gqa, short_conv, tokens};
use crate::support::{
    config, exact_cpu, fixtures, logits_in_chunks, logits_in_groups, logits_of, max_difference,
    open, runner_in, staged_in,
};
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_kernels::{Backend, BackendKvDtype, KvDtypeKind, KvF32, KvInt8, LlmBackend};
use ferrum_models::{
    Dequantized, KvLayout, LayerCache, LogitRows, Model, ModelRunner, RankShard, RunnerConfig,
    SeqStep, ShardBoundaries, Stage, StateInit, StepBatch, StepOutput, WeightPolicy, load_weights,
    memory_plan, rank_memory_plan,
};
use ferrum_types::{BlockId, StateSlot, TokenId};

const WHOLE: KvLayout = KvLayout::Paged { block_size: 4 };
const GROUPED: KvLayout = KvLayout::Grouped { block_size: 4 };

/// Windows, widths, and two layers that share: one of another number of query heads, one with a narrower window.
fn layers() -> Vec<Attention> {
    vec![
        Attention {
            window: Some(6),
            ..PLAIN
        },
        Attention {
            value_dim: 12,
            ..PLAIN
        },
        Attention {
            heads: 6,
            value_dim: 12,
            shared_kv: Some(1),
            ..PLAIN
        },
        Attention {
            window: Some(5),
            shared_kv: Some(0),
            ..PLAIN
        },
        Attention {
            kv_heads: 1,
            value_dim: 5,
            ..PLAIN
        },
    ]
}

/// Short convolutions beside attention with and without a window.
fn hybrid() -> Vec<Attention> {
    vec![
        short_conv(3),
        Attention {
            window: Some(6),
            ..PLAIN
        },
        short_conv(4),
        Attention {
            value_dim: 12,
            ..PLAIN
        },
        Attention {
            value_dim: 12,
            shared_kv: Some(3),
            ..PLAIN
        },
        short_conv(1),
    ]
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

fn check<B: LlmBackend + BackendKvDtype<KvF32>>(device: &B, layers: &[Attention]) {
    let naive = Naive::new(layers);
    let dir = tempfile::tempdir().unwrap();
    let (model, tokens) = (naive.open(dir.path()), tokens(41));
    let expected = naive.logits(&tokens);
    let mut runner = runner_in::<_, KvF32, Dequantized>(device, &model, WHOLE);
    let all = logits_in_chunks(&mut runner, &tokens, &[usize::MAX]);
    let difference = max_difference(&all, &expected);
    assert!(difference <= 1e-4, "{difference}");
    let chunked = logits_in_chunks(&mut runner, &tokens, &[7, 1, 3]);
    assert_eq!(bits(&chunked), bits(&all));
    let mut grouped = runner_in::<_, KvF32, Dequantized>(device, &model, GROUPED);
    assert_eq!(grouped.cache_groups().len(), 2);
    for chunk in [1, 5, tokens.len()] {
        let found = logits_in_groups(&mut grouped, &tokens, chunk);
        assert_eq!(bits(&found), bits(&all), "chunks of {chunk}");
    }
}

#[test]
fn the_reference_computes_what_the_formulas_say() {
    check(&ReferenceBackend::open(0).unwrap(), &layers());
    check(&ReferenceBackend::open(0).unwrap(), &hybrid());
}

#[test]
fn the_cpu_computes_what_the_formulas_say() {
    check(&exact_cpu(), &layers());
    check(&exact_cpu(), &hybrid());
}

/// Logits of the last of `tokens`, the others being in the cache.
fn next<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind>(
    runner: &mut ModelRunner<B, K>,
    tokens: &[TokenId],
    (start, blocks): (usize, &[BlockId]),
) -> Vec<f32> {
    let mut batch = StepBatch::default();
    let step = SeqStep {
        tokens: &tokens[start..],
        start,
        prompt_len: tokens.len(),
        blocks,
        hidden: false,
        logits: LogitRows::Last,
        adapter: None,
    };
    batch.push(step).unwrap();
    logits_of(runner, &batch)
}

fn blocks_move<K: KvDtypeKind>()
where
    ReferenceBackend: BackendKvDtype<K>,
    ferrum_kernels::cpu::CpuBackend: BackendKvDtype<K>,
{
    let dir = tempfile::tempdir().unwrap();
    let model = Naive::new(&layers()).open(dir.path());
    let tokens = tokens(20);
    let cpu = exact_cpu();
    let mut from = runner_in::<_, K, Dequantized>(&cpu, &model, WHOLE);
    let here: Vec<_> = [3, 9, 4, 0, 7].map(BlockId).to_vec();
    let whole = next(&mut from, &tokens[..19], (0, &here));
    assert!(whole.iter().all(|x| x.is_finite()));
    let layout = from.kv_block_layout(0).unwrap();
    let widths: Vec<_> = layout.layers.iter().map(|part| part.value_dim).collect();
    // Layers that share have nothing of their own.
    assert_eq!(widths, [8, 12, 5]);
    let mut bytes = vec![0; 5 * layout.bytes];
    from.read_kv_blocks(0, &here, &mut bytes).unwrap();
    let mut to = runner_in::<_, K, Dequantized>(&cpu, &model, WHOLE);
    let there: Vec<_> = [1, 2, 8, 11, 5].map(BlockId).to_vec();
    to.write_kv_blocks(0, &there, &bytes).unwrap();
    let expected = next(&mut from, &tokens, (19, &here));
    assert_eq!(bits(&next(&mut to, &tokens, (19, &there))), bits(&expected));
    let reference = ReferenceBackend::open(0).unwrap();
    let mut other = runner_in::<_, K, Dequantized>(&reference, &model, WHOLE);
    other.write_kv_blocks(0, &there, &bytes).unwrap();
    let found = next(&mut other, &tokens, (19, &there));
    let difference = max_difference(&found, &expected);
    // In few bits, what the last token appends may end in the next code.
    assert!(
        difference <= if K::SCALED { 0.05 } else { 1e-4 },
        "{difference}"
    );
}

#[test]
fn blocks_of_layers_that_differ_go_elsewhere() {
    blocks_move::<KvF32>();
    blocks_move::<KvInt8>();
}

#[test]
fn stages_keep_layers_that_share_together() {
    let naive = Naive::new(&layers());
    let dir = tempfile::tempdir().unwrap();
    let (model, tokens) = (naive.open(dir.path()), tokens(23));
    let cpu = exact_cpu();
    let mut alone = runner_in::<_, KvF32, Dequantized>(&cpu, &model, WHOLE);
    let whole = logits_in_chunks(&mut alone, &tokens, &[usize::MAX]);
    let mut staged = staged_in::<_, _, KvF32, Dequantized, Dequantized>(
        (&cpu, &cpu),
        &model,
        &[0..4, 4..5],
        config(WHOLE),
    );
    let found = logits_in_chunks(&mut staged, &tokens, &[9, 2]);
    assert_eq!(bits(&found), bits(&whole));
    let refused = Stage::new(&model.spec, 1..5).unwrap_err();
    assert_eq!(
        refused,
        "layer 3 shares the keys and values of layer 0, expected both in one stage"
    );
}

#[test]
fn pools_are_those_of_layers_with_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let model = Naive::new(&layers()).open(dir.path());
    let whole: RunnerConfig = config(WHOLE);
    let found: Vec<_> = whole
        .layer_caches(&model.spec)
        .into_iter()
        .map(|cache| match cache {
            LayerCache::Pool { shape, .. } => (shape.kv_heads, shape.head_dim, shape.value_dim),
            LayerCache::Shared(owner) => (owner, 0, 0),
            other => panic!("{other:?}"),
        })
        .collect();
    let expected = [(2, 8, 8), (2, 8, 12), (1, 0, 0), (0, 0, 0), (1, 8, 5)];
    assert_eq!(found, expected);
    let policy = WeightPolicy::of::<ReferenceBackend, Dequantized>();
    let plan = memory_plan::<KvF32>(&model, policy, &whole);
    let per_token = 4 * (2 * 16 + 2 * 20 + 13);
    assert_eq!(plan.kv_per_token, per_token);
    assert_eq!(plan.kv, 512 * per_token);
}

#[test]
fn what_cannot_be_shared_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let model = Naive::new(&layers()).open(dir.path());
    let refusal = |change: &dyn Fn(&mut ferrum_models::DecoderSpec)| {
        let mut spec = model.spec.clone();
        change(&mut spec);
        spec.validate().unwrap_err()
    };
    for owner in [2, 3, 9] {
        let found = refusal(&|spec| gqa(spec, 2).shared_kv = Some(owner));
        assert!(found.contains("expected an earlier layer"), "{found}");
    }
    let found = refusal(&|spec| gqa(spec, 3).shared_kv = Some(2));
    assert!(found.contains("expected an earlier layer"), "{found}");
    let found = refusal(&|spec| gqa(spec, 2).value_dim = 8);
    assert!(found.contains("has 2 of 8 and 12"), "{found}");
    let found = refusal(&|spec| gqa(spec, 3).sliding_window = Some(7));
    assert!(found.contains("reaches further"), "{found}");
}

/// A sequence of a step: its tokens, how many of them are in the cache, its blocks and its slot.
type Seq<'a> = (&'a [TokenId], usize, [BlockId; 6], u32);

/// Copies of states before and after a step, from slot to slot.
type Copies<'a> = (&'a [(u32, u32)], &'a [(u32, u32)]);

/// Logits of all new tokens of these sequences in one step, with copies of states before and after it.
fn step<B: LlmBackend + BackendKvDtype<KvF32>>(
    runner: &mut ModelRunner<B, KvF32>,
    seqs: &[Seq<'_>],
    (starts, keeps): Copies<'_>,
) -> Vec<f32> {
    let mut batch = StepBatch::default();
    for (from, slot) in starts {
        batch.state_inits.push(StateInit {
            slot: StateSlot(*slot),
            from: Some(StateSlot(*from)),
        });
    }
    for (tokens, start, blocks, slot) in seqs {
        let step = SeqStep {
            tokens: &tokens[*start..],
            start: *start,
            prompt_len: tokens.len(),
            blocks,
            hidden: false,
            logits: LogitRows::All,
            adapter: None,
        };
        batch.push(step).unwrap();
        batch.add_state(StateSlot(*slot));
    }
    let slots = |&(from, to): &(u32, u32)| (StateSlot(from), StateSlot(to));
    batch.state_keeps.extend(keeps.iter().map(slots));
    logits_of(runner, &batch)
}

fn states_in_batches<B: LlmBackend + BackendKvDtype<KvF32>>(device: &B) {
    let dir = tempfile::tempdir().unwrap();
    let model = Naive::new(&hybrid()).open(dir.path());
    let weights = load_weights::<B, Dequantized>(device, &model, &mut |_, _| ()).unwrap();
    let sizes = RunnerConfig {
        kept_states: 2,
        ..config(WHOLE)
    };
    let mut runner =
        ModelRunner::<B, KvF32>::new(device, model.spec.clone(), weights, sizes).unwrap();
    let slots = runner.state_slots().unwrap();
    assert_eq!((slots.working, slots.kept), (4, 2));
    let vocab = model.spec.vocab_size;
    let (a, b) = (tokens(23), tokens(40)[20..].to_vec());
    let table = |first: u32| std::array::from_fn(|i| BlockId(first + 2 * i as u32));
    let none = (&[][..], &[][..]);
    let alone = step(&mut runner, &[(&a, 0, table(0), 3)], none);
    let other = step(&mut runner, &[(&b, 0, table(1), 0)], none);
    // Side by side, in chunks of different length; the state of the first after 12 tokens is kept in slot 5.
    let first = [(&a[..12], 0, table(0), 1), (&b[..7], 0, table(1), 2)];
    let mut found = step(&mut runner, &first, (&[], &[(1, 5)]));
    let rest = found.split_off(12 * vocab);
    let next = [(&b[..9], 7, table(1), 2), (&a[..13], 12, table(0), 1)];
    let mut second = step(&mut runner, &next, none);
    found.extend(second.split_off(2 * vocab));
    let rest = [rest, second].concat();
    let last = [(&a[..], 13, table(0), 1), (&b[..], 9, table(1), 2)];
    let mut last = step(&mut runner, &last, none);
    let end = last.split_off((a.len() - 13) * vocab);
    assert_eq!(bits(&[found, last].concat()), bits(&alone));
    assert_eq!(bits(&[rest, end].concat()), bits(&other));
    // Another sequence goes on from what was kept, over the same blocks.
    let again = [(&a[..], 12, table(0), 0)];
    let found = step(&mut runner, &again, (&[(5, 0)], &[]));
    assert_eq!(bits(&found), bits(&alone[12 * vocab..]));
    // Slots that are not there, missing, or taken twice.
    let mut refused = |slots: &[u32]| {
        let mut batch = StepBatch::default();
        for _ in 0..2 {
            let step = SeqStep {
                tokens: &a[..2],
                start: 0,
                prompt_len: 2,
                blocks: &table(0),
                hidden: false,
                logits: LogitRows::None,
                adapter: None,
            };
            batch.push(step).unwrap();
        }
        batch
            .state_slots
            .extend(slots.iter().map(|&slot| StateSlot(slot)));
        let refused = runner.run(&batch, &[], &mut StepOutput::default());
        refused.unwrap_err().to_string()
    };
    for (slots, words) in [
        (&[][..], "0 sequences have a state slot, expected 2"),
        (&[1, 6], "state slot 6 is outside of the 6"),
        (&[2, 2], "state slot 2 is that of two sequences"),
    ] {
        let found = refused(slots);
        assert!(found.contains(words), "{found}");
    }
}

/// Blocks and the state of a sequence go to another runner, on this device or another one.
#[test]
fn states_move_with_their_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let model = Naive::new(&hybrid()).open(dir.path());
    let sizes = RunnerConfig {
        kept_states: 2,
        ..config(WHOLE)
    };
    fn runner<B: LlmBackend + BackendKvDtype<KvF32>>(
        device: &B,
        model: &Model,
        sizes: RunnerConfig,
    ) -> ModelRunner<B, KvF32> {
        let weights = load_weights::<B, Dequantized>(device, model, &mut |_, _| ()).unwrap();
        ModelRunner::new(device, model.spec.clone(), weights, sizes).unwrap()
    }
    fn take<B: LlmBackend + BackendKvDtype<KvF32>>(
        to: &mut ModelRunner<B, KvF32>,
        (blocks, state): (&[u8], &[u8]),
        tokens: &[TokenId],
    ) -> Vec<f32> {
        let there = [4, 1, 9].map(BlockId);
        to.write_kv_blocks(0, &there, blocks).unwrap();
        to.write_state(StateSlot(2), state).unwrap();
        let table = [4, 1, 9, 2, 3, 5].map(BlockId);
        step(to, &[(tokens, 12, table, 2)], (&[], &[]))
    }
    let text = tokens(15);
    let table = [0, 2, 4, 6, 8, 10].map(BlockId);
    let cpu = exact_cpu();
    let mut from = runner(&cpu, &model, sizes);
    step(&mut from, &[(&text[..12], 0, table, 1)], (&[], &[]));
    let layout = from.kv_block_layout(0).unwrap();
    let mut blocks = vec![0; 3 * layout.bytes];
    from.read_kv_blocks(0, &table[..3], &mut blocks).unwrap();
    let numbers = from.state_layout().unwrap().unwrap();
    assert_eq!(numbers.bytes, 4 * numbers.layers.iter().sum::<usize>());
    let mut state = vec![0; numbers.bytes];
    from.read_state(StateSlot(1), &mut state).unwrap();
    let expected = step(&mut from, &[(&text, 12, table, 1)], (&[], &[]));
    let kept = (&blocks[..], &state[..]);
    let found = take(&mut runner(&cpu, &model, sizes), kept, &text);
    assert_eq!(bits(&found), bits(&expected));
    let reference = ReferenceBackend::open(0).unwrap();
    let found = take(&mut runner(&reference, &model, sizes), kept, &text);
    assert!(max_difference(&found, &expected) <= 1e-4);
    // A slot that is not there, and another length.
    let slots = from.state_slots().unwrap().count() as u32;
    let refused = from.read_state(StateSlot(slots), &mut state).unwrap_err();
    assert!(refused.to_string().contains("state slot 6, there are 6"));
    assert!(from.write_state(StateSlot(0), &state[1..]).is_err());
    assert!(from.kv_block_layout(1).is_err());
}

#[test]
fn states_change_no_bit_batched_or_not_kept_or_not() {
    states_in_batches(&ReferenceBackend::open(0).unwrap());
    states_in_batches(&exact_cpu());
}

#[test]
fn states_and_pools_are_planned() {
    let dir = tempfile::tempdir().unwrap();
    let model = Naive::new(&hybrid()).open(dir.path());
    let sizes = RunnerConfig {
        kept_states: 5,
        ..config(WHOLE)
    };
    let policy = WeightPolicy::of::<ReferenceBackend, Dequantized>();
    let plan = memory_plan::<KvF32>(&model, policy, &sizes);
    // Four sequences, five kept states and one of zeros; 2, 3 and 0 inputs of 24 channels.
    assert_eq!(plan.states, 4 * 10 * (2 + 3) * 24);
    let alone = memory_plan::<KvF32>(&Naive::new(&layers()).open(dir.path()), policy, &sizes);
    assert_eq!(alone.states, 0);
    let half = rank_memory_plan::<KvF32>(
        &model,
        policy,
        &sizes,
        &model.shard(policy, (1, 2)).unwrap(),
    );
    assert_eq!(half.states, plan.states / 2);
    let refused = RankShard::new(&model.spec, &ShardBoundaries::default(), (0, 25)).unwrap_err();
    let reason = "layer 0: found a convolution of 24 elements, expected at least 25";
    assert!(refused.contains(reason), "{refused}");
}

/// A token takes one compressed row and its rotated part in each layer, however many heads there are.
#[test]
fn latent_attention_keeps_one_row_of_a_token() {
    let model = open(&fixtures().join("deepseek2"));
    let config = RunnerConfig::single(64);
    let plan = memory_plan::<KvF32>(&model, WeightPolicy::floats(), &config);
    assert_eq!(plan.kv_per_token, 3 * (24 + 10) * 4);
    for cache in config.layer_caches(&model.spec) {
        let LayerCache::Pool { shape, .. } = cache else {
            panic!("{cache:?}");
        };
        let row = (shape.kv_heads, shape.head_dim, shape.value_dim);
        assert_eq!(row, (1, 34, 24));
        assert!(shape.values_in_keys);
    }
}
