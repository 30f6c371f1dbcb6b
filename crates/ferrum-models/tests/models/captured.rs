//! Steps on a device that captures: filled up with rows that nobody notices, replayed, and with one small upload each.
//!
//! The device is the conformance suite's [`Minimal`], which records and replays; what it has to give is what the
//! reference of the same elements gives, bit for bit.

use crate::support::naive::{Attention, Naive, PLAIN, short_conv};
use crate::support::{fixtures, open, staged_in};
use ferrum_conformance::minimal::{Minimal, Uploads};
use ferrum_kernels::reference::{Mixed, Reference};
use ferrum_kernels::{KvF32, LlmBackend, LogitAdjustment, RowSampling};
use ferrum_models::{
    CacheGroup, Dequantized, GraphCounts, KvLayout, LogitRows, Model, ModelRunner, Readback,
    RowOutput, RunnerConfig, SeqStep, StepBatch, StepOutput, load_weights,
};
use ferrum_types::{BlockId, StateSlot, TokenId};
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
        let (batch, wanted) = batch_of(&self.config, self.plain.cache_groups(), parts);
        let (mut found, mut expected) = (StepOutput::default(), StepOutput::default());
        let before = self.device.uploads();
        self.captured.run(&batch, &wanted, &mut found).unwrap();
        let after = self.device.uploads();
        self.plain.run(&batch, &wanted, &mut expected).unwrap();
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
