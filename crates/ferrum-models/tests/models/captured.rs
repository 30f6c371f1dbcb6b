//! Steps on a device that captures: filled up with rows that nobody notices, replayed, and with one small upload each.
//!
//! The device is the conformance suite's [`Minimal`], which records and replays; what it has to give is what the
//! reference of the same elements gives, bit for bit.

use crate::support::naive::{Attention, Naive, PLAIN, short_conv};
use crate::support::{fixtures, open, staged_in};
use ferrum_conformance::minimal::{Minimal, Uploads};
use ferrum_formats::{LoraFolder, ModelSource};
use ferrum_kernels::reference::{Mixed, Reference};
use ferrum_kernels::{KvF32, LlmBackend, LogitAdjustment, RowSampling};
use ferrum_models::{
    AuxHiddenPoint, AuxHiddenState, CacheGroup, Dequantized, DraftHead, FeatureSource, GraphCounts,
    KvLayout, LogitRows, Model, ModelRunner, Readback, RowOutput, RunnerConfig, SeqStep, StepBatch,
    StepOutput, load_draft_head, load_weights, read_eagle3, read_mtp,
};
use ferrum_types::{AdapterId, BlockId, StateSlot, TokenId};
use half::bf16;

/// Computes as `Minimal` does, and captures nothing.
type Plain = Reference<Mixed<bf16>>;

const CONFIG: RunnerConfig = RunnerConfig {
    context: 96,
    max_seqs: 6,
    max_tokens: 72,
    max_logit_rows: 72,
    kv_tokens: 6 * 96,
    layout: KvLayout::Grouped { block_size: 8 },
    kept_states: 0,
    profile: false,
};

fn runner<B: LlmBackend>(device: &B, model: &Model, config: RunnerConfig) -> ModelRunner<B, KvF32> {
    let weights = load_weights::<B, Dequantized>(device, model, &mut |_, _| ()).unwrap();
    ModelRunner::new(device, model.spec.clone(), weights, config).unwrap()
}

/// What is wanted of the rows of a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Want {
    Greedy,
    Sampled,
    /// With a mask that is longer than the settings of all rows.
    Masked,
    Logits,
}

/// Tokens of a sequence in a step: its number, the first position, the tokens, and what is wanted of each.
type Part<'a> = (usize, usize, &'a [TokenId], Want);

/// Blocks of sequence `seq` in a group, backwards, and from the first again where a window needs no more.
fn table(config: &RunnerConfig, group: &CacheGroup, seq: usize) -> Vec<BlockId> {
    let each = group.blocks / config.max_seqs;
    let blocks = 0..config.context.div_ceil(group.block_size);
    let block = |i: usize| BlockId((seq * each + each - 1 - i % each) as u32);
    blocks.map(block).collect()
}

fn batch_of(
    config: &RunnerConfig,
    groups: &[CacheGroup],
    parts: &[Part<'_>],
) -> (StepBatch, Vec<Readback>) {
    let (mut batch, mut wanted) = (StepBatch::default(), Vec::new());
    for &(seq, start, tokens, want) in parts {
        batch
            .push(SeqStep {
                tokens,
                start,
                prompt_len: 4,
                blocks: &table(config, &groups[0], seq),
                logits: LogitRows::All,
                adapter: None,
                hidden: false,
            })
            .unwrap();
        add_tables(&mut batch, config, groups, seq);
        if config.kept_states > 0 {
            batch.add_state(StateSlot(seq as u32));
        }
        for (i, &token) in tokens.iter().enumerate() {
            wanted.push(match want {
                Want::Greedy => Readback::GREEDY,
                Want::Sampled | Want::Masked => Readback::SAMPLED,
                Want::Logits => Readback::Logits,
            });
            if matches!(want, Want::Sampled | Want::Masked) {
                let row = RowSampling {
                    temperature: 0.5 + 0.25 * seq as f32,
                    top_k: 40,
                    uniform: f64::from((start + i) as u32 * 37 % 64) / 64.0,
                    repeat_penalty: 1.5,
                    logprobs: (seq % 2 == 0).then_some(2),
                    ..RowSampling::default()
                };
                let change = LogitAdjustment::none(token).with_occurrence();
                let mask = [0x7fff_fff7; 512];
                let mask = match want {
                    Want::Masked => Some(&mask[..]),
                    _ => (seq % 3 == 1).then_some(&mask[..16]),
                };
                batch.sampling.push(row, [change], mask);
            }
        }
    }
    (batch, wanted)
}

/// The tables of the sequence that was added last, in all groups but the first.
fn add_tables(batch: &mut StepBatch, config: &RunnerConfig, groups: &[CacheGroup], seq: usize) {
    for (index, group) in groups.iter().enumerate().skip(1) {
        let table = table(config, group, seq);
        batch.add_table(index, &table).unwrap();
    }
}

/// What came of all rows.
fn outcome(output: &mut StepOutput, rows: usize) -> Vec<String> {
    let row = |row| match output.row(row) {
        RowOutput::Logits(logits) => {
            let bits: Vec<_> = logits.iter().map(|x| x.to_bits()).collect();
            format!("{bits:?}")
        }
        other => format!("{other:?}"),
    };
    (0..rows).map(row).collect()
}

/// A runner that captures, and one that does not, which have to agree.
struct Pair {
    config: RunnerConfig,
    device: Minimal,
    captured: ModelRunner<Minimal, KvF32>,
    plain: ModelRunner<Plain, KvF32>,
}

impl Pair {
    fn new(name: &str, config: RunnerConfig) -> Self {
        Self::of(&open(&fixtures().join(name)), config)
    }

    fn of(model: &Model, config: RunnerConfig) -> Self {
        let device = Minimal::default();
        Self {
            config,
            captured: runner(&device, model, config),
            plain: runner(&Plain::new(), model, config),
            device,
        }
    }

    /// Of a draft head.
    fn of_head(head: &DraftHead, target: &Model) -> Self {
        fn runner<B: LlmBackend>(
            device: &B,
            head: &DraftHead,
            target: &Model,
        ) -> ModelRunner<B, KvF32> {
            type Form = Dequantized;
            let weights = load_weights::<B, Form>(device, target, &mut |_, _| ()).unwrap();
            let shared = weights.shared_tables();
            let weights = load_draft_head::<B, Form>(device, head, target, shared).unwrap();
            ModelRunner::new(device, head.spec().clone(), weights, CONFIG).unwrap()
        }
        let device = Minimal::default();
        Self {
            config: CONFIG,
            captured: runner(&device, head, target),
            plain: runner(&Plain::new(), head, target),
            device,
        }
    }

    /// The captured one in two stages.
    fn in_stages(name: &str) -> Self {
        let (model, device) = (open(&fixtures().join(name)), Minimal::default());
        let layers = [0..1, 1..model.spec.layers.len()];
        let devices = (&device, &device);
        Self {
            config: CONFIG,
            captured: staged_in::<_, _, KvF32, Dequantized, Dequantized>(
                devices, &model, &layers, CONFIG,
            ),
            plain: runner(&Plain::new(), &model, CONFIG),
            device,
        }
    }

    /// Runs a step on both; what was uploaded for it.
    fn step(&mut self, parts: &[Part<'_>]) -> Uploads {
        self.changed_step(parts, |_, _| ())
    }

    /// The same, of a batch and what is wanted of it that `change` has seen.
    fn changed_step(
        &mut self,
        parts: &[Part<'_>],
        change: impl FnOnce(&mut StepBatch, &mut Vec<Readback>),
    ) -> Uploads {
        let groups = self.plain.cache_groups();
        let (mut batch, mut wanted) = batch_of(&self.config, groups, parts);
        change(&mut batch, &mut wanted);
        let (mut found, mut expected) = (StepOutput::default(), StepOutput::default());
        let before = self.device.uploads();
        self.captured.run(&batch, &wanted, &mut found).unwrap();
        let after = self.device.uploads();
        self.plain.run(&batch, &wanted, &mut expected).unwrap();
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let hidden = [&found, &expected].map(|output| bits(output.aux_hidden()));
        assert!(hidden[0] == hidden[1], "hidden states of {parts:?} differ");
        let rows = wanted.len();
        let (found, expected) = (outcome(&mut found, rows), outcome(&mut expected, rows));
        for (row, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert!(found == expected, "row {row} of {parts:?} differs");
        }
        Uploads {
            count: after.count - before.count,
            bytes: after.bytes - before.bytes,
        }
    }

    /// Prompts of 4 tokens for so many sequences, too long together to be captured.
    fn prompts(&mut self, seqs: usize) {
        for seq in 0..seqs {
            let tokens: Vec<_> = (0..4).map(|i| (seq * 7 + i) as TokenId % 30 + 3).collect();
            let (mut batch, groups) = (StepBatch::default(), self.plain.cache_groups());
            let part = SeqStep {
                tokens: &tokens,
                start: 0,
                prompt_len: 4,
                blocks: &table(&self.config, &groups[0], seq),
                logits: LogitRows::None,
                adapter: None,
                hidden: false,
            };
            batch.push(part).unwrap();
            add_tables(&mut batch, &self.config, groups, seq);
            if self.config.kept_states > 0 {
                batch.add_state(StateSlot(seq as u32));
            }
            let mut output = StepOutput::default();
            self.captured.run(&batch, &[], &mut output).unwrap();
            self.plain.run(&batch, &[], &mut output).unwrap();
        }
    }

    fn counts(&self) -> GraphCounts {
        self.captured.graph_counts()
    }

    /// What a step adds to the number of steps that were captured and replayed.
    fn adds(&mut self, step: impl FnOnce(&mut Self)) -> (u64, u64) {
        let before = self.counts();
        step(self);
        let after = self.counts();
        (
            after.captured - before.captured,
            after.replayed - before.replayed,
        )
    }
}

/// Models whose layers have windows, biases, tables that depend on the length, norms behind parts, parts in parallel,
/// learned positions and factors, and none of these. None has caps: the reference rounds them once, and the provided body of
/// that op three times.
const MODELS: [&str; 10] = [
    "llama3-tied",
    "mistral-window",
    "qwen2",
    "llama-dynamic",
    "glm4",
    "olmo2",
    "phi2",
    "gpt2",
    "granite",
    "command-r",
];

#[test]
fn what_fills_a_step_up_changes_no_bit() {
    for name in MODELS {
        let mut pair = Pair::new(name, CONFIG);
        pair.prompts(6);
        assert_eq!(pair.counts(), GraphCounts::default(), "{name}: prompts");
        // Three sequences are filled up to four, five to six.
        for (step, seqs) in [3, 5, 3, 1, 6, 5, 3].into_iter().enumerate() {
            let token = [20 + step as TokenId];
            let want = [Want::Greedy, Want::Sampled, Want::Logits];
            // All of a kind first, then mixed.
            let want = |seq: usize| want[if step < 3 { step } else { seq % 3 }];
            let parts: Vec<_> = (0..seqs)
                .map(|seq| (seq, 4, &token[..], want(seq)))
                .collect();
            pair.step(&parts);
        }
        let counts = pair.counts();
        assert_eq!(counts.captured + counts.replayed, 7, "{name}");
    }
}

/// With recurrent states, what fills a step up has a slot that is no sequence's.
#[test]
fn steps_with_states_are_captured() {
    let dir = tempfile::tempdir().unwrap();
    let windowed = Attention {
        window: Some(9),
        ..PLAIN
    };
    let layers = [short_conv(3), PLAIN, short_conv(4), windowed];
    let model = Naive::new(&layers).open(dir.path());
    let config = RunnerConfig {
        kept_states: 1,
        ..CONFIG
    };
    let mut pair = Pair::of(&model, config);
    pair.prompts(6);
    for at in 4..14 {
        let token = [at as TokenId];
        // Three sequences are filled up to four, five to six; what is not in a step stays.
        let seqs = if at < 10 { 5 } else { 3 };
        let parts: Vec<_> = (0..seqs)
            .map(|seq| (seq, at, &token[..], Want::Logits))
            .collect();
        pair.step(&parts);
    }
    pair.step(&[(5, 4, &[9], Want::Logits)]);
    let counts = pair.counts();
    assert_eq!((counts.captured, counts.replayed), (3, 8));
}

#[test]
fn decodes_and_checks_of_drafts_are_captured_once() {
    for want in [Want::Greedy, Want::Sampled, Want::Logits] {
        let mut pair = Pair::new("llama3-tied", CONFIG);
        pair.prompts(5);
        for at in 4..14 {
            let token = [at as TokenId];
            let parts: Vec<_> = (0..5).map(|seq| (seq, at, &token[..], want)).collect();
            pair.step(&parts);
        }
        let expected = GraphCounts {
            captured: 1,
            replayed: 9,
            reset: 0,
            held: 1,
        };
        assert_eq!(pair.counts(), expected, "{want:?}");
        // Drafts of 2 to 4 tokens, and a sequence without one: up to 5 tokens each.
        let drafts: [&[TokenId]; 4] = [&[5, 6, 7], &[8], &[9, 10, 11, 12, 13], &[14, 15, 16, 17]];
        for round in 0..4 {
            let draft = |seq: usize| drafts[(seq + round) % 4];
            let parts: Vec<_> = (0..4).map(|seq| (seq, 14, draft(seq), want)).collect();
            pair.step(&parts);
        }
        let counts = pair.counts();
        assert_eq!(
            (counts.captured, counts.replayed, counts.held),
            (2, 12, 2),
            "{want:?}"
        );
        // A model's next decode finds its graph again.
        pair.step(&[
            (0, 14, &[3], want),
            (2, 14, &[4], want),
            (3, 14, &[4], want),
            (1, 14, &[1], want),
            (4, 14, &[1], want),
        ]);
        assert_eq!(pair.counts().replayed, 13, "{want:?}");
    }
}

#[test]
fn the_number_of_graphs_is_bounded() {
    let mut pair = Pair::new("qwen2", CONFIG);
    pair.prompts(6);
    for round in 0..3 {
        for seqs in 1..=6 {
            for want in [Want::Greedy, Want::Logits] {
                let token = [7 + round];
                let parts: Vec<_> = (0..seqs).map(|seq| (seq, 4, &token[..], want)).collect();
                pair.step(&parts);
            }
        }
    }
    let counts = pair.counts();
    // 1, 2, 4 and 6 sequences, whose tokens are chosen or not.
    assert_eq!((counts.held, counts.captured, counts.replayed), (8, 8, 28));
}

#[test]
fn graphs_over_a_buffer_that_has_grown_are_reset() {
    let mut pair = Pair::new("llama3-tied", CONFIG);
    pair.prompts(6);
    let token = [9];
    let parts = |seqs: usize| -> Vec<Part<'_>> {
        (0..seqs)
            .map(|seq| (seq, 4, &token[..], Want::Masked))
            .collect()
    };
    pair.step(&parts(1));
    assert_eq!(pair.counts().held, 1);
    // Six masks are longer than one.
    pair.step(&parts(6));
    assert_eq!((pair.counts().held, pair.counts().reset), (1, 1));
    pair.step(&parts(1));
    pair.step(&parts(6));
    let counts = pair.counts();
    assert_eq!((counts.captured, counts.replayed, counts.held), (3, 1, 2));
}

#[test]
fn stages_are_filled_up_each_by_itself() {
    for name in ["llama3-tied", "mistral-window"] {
        let mut pair = Pair::in_stages(name);
        pair.prompts(5);
        for (step, seqs) in [3, 5, 3, 5].into_iter().enumerate() {
            let token = [20 + step as TokenId, 3];
            let queries = 1 + step / 2;
            let parts: Vec<_> = (0..seqs)
                .map(|seq| (seq, 4, &token[..queries], Want::Sampled))
                .collect();
            pair.step(&parts);
        }
        assert_eq!(pair.counts().captured, 4, "{name}");
    }
}

/// A row of which nothing is wanted is one of those that fill a step up, not one less.
#[test]
fn rows_of_which_nothing_is_wanted_have_the_graph_of_others() {
    let mut pair = Pair::new("llama3-tied", CONFIG);
    pair.prompts(4);
    let step = |pair: &mut Pair, first: Readback, others: Readback| {
        pair.adds(|pair| {
            let parts: Vec<Part<'_>> = (0..4).map(|seq| (seq, 4, &[9][..], Want::Greedy)).collect();
            pair.changed_step(&parts, |_, wanted| {
                wanted.fill(others);
                wanted[0] = first;
            });
        })
    };
    use Readback::{Logits, Nothing};
    for (first, others, expected) in [
        (Nothing, Readback::GREEDY, (1, 0)),
        (Readback::GREEDY, Readback::GREEDY, (0, 1)),
        (Nothing, Nothing, (1, 0)),
        (Logits, Logits, (0, 1)),
        (Nothing, Logits, (0, 1)),
    ] {
        assert_eq!(
            step(&mut pair, first, others),
            expected,
            "{first:?}, {others:?}"
        );
    }
}

#[test]
fn steps_of_one_adapter_are_captured() {
    let mut pair = Pair::new("llama3-tied", CONFIG);
    let load = |pair: &mut Pair, id, name: &str| {
        let folder = LoraFolder::open(fixtures().join("../lora").join(name)).unwrap();
        pair.captured.load_adapter(id, &folder).unwrap();
        pair.plain.load_adapter(id, &folder).unwrap();
    };
    let [all, up, other] = [7, 8, 9].map(AdapterId);
    load(&mut pair, all, "llama-all");
    load(&mut pair, up, "llama-up");
    pair.prompts(5);
    // Three sequences, which are filled up to four.
    let step = |pair: &mut Pair, adapters: [Option<AdapterId>; 3]| {
        pair.adds(|pair| {
            let parts: Vec<Part<'_>> = (0..3).map(|seq| (seq, 4, &[9][..], Want::Logits)).collect();
            pair.changed_step(&parts, |batch, _| batch.adapters = adapters.to_vec());
        })
    };
    for adapter in [Some(all), Some(up), None] {
        assert_eq!(step(&mut pair, [adapter; 3]), (1, 0), "{adapter:?}");
    }
    for adapter in [Some(up), Some(all), None] {
        assert_eq!(step(&mut pair, [adapter; 3]), (0, 1), "{adapter:?}");
    }
    for mixed in [[Some(all), Some(all), None], [None, Some(up), Some(all)]] {
        assert_eq!(step(&mut pair, mixed), (0, 0), "{mixed:?}");
    }
    // Nothing that is there goes away by another adapter of the same rank.
    load(&mut pair, AdapterId(6), "llama-up");
    assert_eq!(step(&mut pair, [Some(all); 3]), (0, 1));
    assert!(!pair.captured.unload_adapter(other));
    assert_eq!(step(&mut pair, [Some(up); 3]), (0, 1));
    // Where an adapter was, there may be another.
    assert!(pair.captured.unload_adapter(up) && pair.plain.unload_adapter(up));
    load(&mut pair, other, "llama-up");
    for adapter in [all, other] {
        assert_eq!(step(&mut pair, [Some(adapter); 3]), (1, 0), "{adapter:?}");
        assert_eq!(step(&mut pair, [Some(adapter); 3]), (0, 1), "{adapter:?}");
    }
}

/// What a draft head reads of a model: hidden states of all rows, or of the last ones, at one place or several.
#[test]
fn steps_that_give_hidden_states_are_captured() {
    let layer = AuxHiddenPoint::Layer;
    let last = 1;
    for name in ["qwen3", "mistral-window"] {
        let mut pair = Pair::new(name, CONFIG);
        pair.prompts(5);
        let parts = |at, queries| {
            let tokens = &[11, 12][..queries];
            let parts = (0..3).map(move |seq| (seq, at, tokens, Want::Sampled));
            parts.collect::<Vec<Part<'_>>>()
        };
        let points = [
            &[AuxHiddenPoint::FinalNorm][..],
            &[layer(0), layer(last)],
            &[layer(0)],
            &[],
        ];
        let mut before = (1, 0);
        for _ in 0..2 {
            for (queries, points) in [1, 2].into_iter().flat_map(|q| points.map(|of| (q, of))) {
                let found = pair.adds(|pair| {
                    pair.changed_step(&parts(4, queries), |batch, _| {
                        (0..3).for_each(|seq| batch.add_aux_hidden(seq, points));
                    });
                });
                assert_eq!(found, before, "{name}: {queries} at {points:?}");
            }
            before = (0, 1);
        }
        // Of fewer rows: the same graph.
        let found = pair.adds(|pair| {
            pair.changed_step(&parts(4, 2), |batch, _| {
                batch.add_aux_hidden(1, &[AuxHiddenPoint::FinalNorm]);
            });
        });
        assert_eq!(found, (0, 1), "{name}");
        // Of some rows twice, for which there is no room at first.
        let twice = |pair: &mut Pair| {
            pair.changed_step(&parts(4, 2), |batch, _| {
                for _ in 0..CONFIG.max_tokens {
                    (0..3).for_each(|seq| batch.add_aux_hidden(seq, &[layer(0)]));
                }
            });
        };
        assert_eq!(pair.adds(twice), (0, 0), "{name}");
        let of_layer = |pair: &mut Pair| {
            pair.changed_step(&parts(4, 2), |batch, _| {
                batch.add_aux_hidden(2, &[layer(0)])
            });
        };
        assert_eq!(pair.adds(of_layer), (1, 0), "{name}");
    }
}

/// Steps of a draft head, of which only the last row of each sequence has logits, beside hidden states of the model and beside its own.
#[test]
fn steps_of_a_draft_head_are_captured() {
    let drafts = fixtures().join("../drafts");
    let target = open(&fixtures().join("qwen3"));
    let source = ModelSource::open(drafts.join("qwen3-eagle3")).unwrap();
    let eagle = read_eagle3(source, &target).unwrap();
    let with_mtp = open(&drafts.join("qwen35-mtp"));
    let mtp = read_mtp(&with_mtp).unwrap();
    for (head, target) in [(eagle, target), (mtp, with_mtp)] {
        let mut pair = Pair::of_head(&head, &target);
        let (dim, of_target) = (head.spec().hidden_size, head.features().target.len());
        let own = head.features().own;
        let mut step = |at: usize, each: usize, source: FeatureSource, gives: bool| {
            let tokens = &[11, 12, 13][..each];
            let parts: Vec<Part<'_>> = (0..3).map(|seq| (seq, at, tokens, Want::Greedy)).collect();
            let width = match source {
                FeatureSource::Target => dim * of_target,
                FeatureSource::Head => dim,
            };
            pair.adds(|pair| {
                pair.changed_step(&parts, |batch, wanted| {
                    let number = |i: usize| ((i * 37 + at) % 19) as f32 / 9.0 - 1.0;
                    batch.features = (0..3 * each * width).map(number).collect();
                    batch.feature_source = source;
                    let last = |seq: u32| (seq + 1) * each as u32 - 1;
                    batch.logit_rows = (0..3).map(last).collect();
                    wanted.truncate(3);
                    if gives {
                        let state = |row| AuxHiddenState { point: own, row };
                        batch.aux_hidden = batch.logit_rows.iter().copied().map(state).collect();
                    }
                });
            })
        };
        use FeatureSource::{Head, Target};
        let name = head.kind();
        for (at, each, source, gives, expected) in [
            (0, 3, Target, true, (1, 0)),
            (3, 1, Head, true, (1, 0)),
            (4, 1, Head, false, (1, 0)),
            // The model's instead of its own, of as many rows.
            (3, 1, Target, false, (1, 0)),
            (4, 1, Head, false, (0, 1)),
            (4, 2, Target, true, (1, 0)),
            (6, 3, Target, true, (0, 1)),
            (9, 1, Target, false, (0, 1)),
        ] {
            let found = step(at, each, source, gives);
            assert_eq!(found, expected, "{name:?}: {each} at {at}, {source:?}");
        }
    }
}

/// A block of a whole context is too dear to be nobody's.
#[test]
fn without_blocks_to_spare_only_whole_sizes_are_captured() {
    let layout = KvLayout::Contiguous;
    let mut pair = Pair::new("llama3-tied", RunnerConfig { layout, ..CONFIG });
    pair.prompts(6);
    for seqs in [3, 4, 5, 6, 4, 3] {
        let token = [seqs as TokenId];
        let parts: Vec<_> = (0..seqs)
            .map(|seq| (seq, 4, &token[..], Want::Greedy))
            .collect();
        pair.step(&parts);
    }
    let counts = pair.counts();
    assert_eq!((counts.captured, counts.replayed), (2, 1));
}

/// A token of a steady decode takes up so much: its id, position, start, length of the cache, row.
const BYTES_OF_A_TOKEN: u64 = 5 * 4;

#[test]
fn a_steady_step_is_one_upload_whatever_the_context() {
    for context in [96, 4096] {
        let config = RunnerConfig {
            context,
            kv_tokens: 6 * context,
            ..CONFIG
        };
        for name in ["llama3-tied", "mistral-window"] {
            let mut pair = Pair::new(name, config);
            pair.prompts(6);
            for at in 4..40 {
                let token = [at as TokenId];
                let parts: Vec<_> = (0..6)
                    .map(|seq| (seq, at, &token[..], Want::Greedy))
                    .collect();
                let found = pair.step(&parts);
                let groups = pair.plain.cache_groups().len() as u64;
                // The end of the last sequence, and settings of 16 words a row.
                let steady = 6 * BYTES_OF_A_TOKEN + 4 + 6 * 64;
                // A block more of each.
                let tables = if at % 8 == 0 { 6 * 4 * groups } else { 0 };
                let expected = Uploads {
                    count: 1,
                    bytes: steady + tables,
                };
                // The first has the tables where prompts had one each, and what ops upload while they are captured.
                assert!(at == 4 || found == expected, "{name} at {at}: {found:?}");
            }
        }
    }
}

/// What a step chooses goes into the next one before the host has it, replayed or not.
#[test]
fn replayed_steps_overlap() {
    let mut pair = Pair::new("llama3-tied", CONFIG);
    pair.prompts(3);
    assert_eq!(pair.captured.in_flight(), 2);
    let groups = &pair.plain.cache_groups().to_vec();
    let mut tokens = [[11], [12], [13]];
    // One by one.
    let mut expected = Vec::new();
    for at in 4..12 {
        let parts: Vec<_> = (0..3)
            .map(|seq| (seq, at, &tokens[seq][..], Want::Greedy))
            .collect();
        let (batch, wanted) = batch_of(&CONFIG, groups, &parts);
        let mut output = StepOutput::default();
        pair.plain.run(&batch, &wanted, &mut output).unwrap();
        for (row, token) in output.tokens() {
            tokens[row] = [token.unwrap()];
        }
        expected.push(tokens);
    }
    // Each step before the last one is read; sequences in another order every time.
    let (mut found, mut before) = (Vec::new(), None);
    let mut places = [0, 1, 2];
    for at in 4..12 {
        let order = [[0, 1, 2], [2, 0, 1], [1, 2, 0]][at % 3];
        let first = [[11], [12], [13]];
        let parts: Vec<_> = order
            .iter()
            .map(|&seq| (seq, at, &first[seq][..], Want::Greedy))
            .collect();
        let (mut batch, wanted) = batch_of(&CONFIG, groups, &parts);
        if before.is_some() {
            for (token, seq) in order.iter().enumerate() {
                let row = places[*seq];
                let token = token as u32;
                batch
                    .pending_tokens
                    .push(ferrum_models::PendingToken { token, row });
            }
        }
        let ticket = pair.captured.submit(&batch, &wanted).unwrap();
        if let Some((ticket, order)) = before.replace((ticket, order)) {
            found.push(collect(&mut pair.captured, ticket, order));
        }
        for (row, &seq) in order.iter().enumerate() {
            places[seq] = row as u32;
        }
    }
    let (ticket, order) = before.unwrap();
    found.push(collect(&mut pair.captured, ticket, order));
    assert_eq!(found, expected);
    assert_eq!((pair.counts().captured, pair.counts().replayed), (1, 7));
}

fn collect(
    runner: &mut ModelRunner<Minimal, KvF32>,
    ticket: ferrum_models::Ticket,
    order: [usize; 3],
) -> [[TokenId; 1]; 3] {
    let mut output = StepOutput::default();
    runner.collect(ticket, &mut output).unwrap();
    let mut tokens = [[0]; 3];
    for (row, token) in output.tokens() {
        tokens[order[row]] = [token.unwrap()];
    }
    tokens
}
