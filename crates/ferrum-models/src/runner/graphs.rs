//! Sizes of steps that are captured, and the graphs of them.
//!
//! A device replays what it captured for buffers of the same sizes. So decodes, checks of drafts, and steps of draft heads
//! are filled up to few sizes with dummy sequences: their keys go to a block that no sequence ever gets, and as the bits of
//! a row depend on that row alone, they change no result. Where nothing is captured, a step has the rows that it has.

use super::config::{KvLayout, RunnerConfig};
use crate::batch::{AuxHiddenPoint, FeatureSource, StepBatch};
use ferrum_kernels::{BackendGraph, BatchShape, GraphKey, GraphRun};
use ferrum_types::{AdapterId, Result};

/// Graphs that are kept; whichever was not used for longest makes room.
const MAX_GRAPHS: usize = 64;

/// Kinds of steps that are told apart; then all graphs are forgotten.
const MAX_KINDS: usize = 256;

/// Most tokens of a sequence in a captured step: one, and a draft.
pub(super) const MAX_QUERIES: usize = 17;

/// The shortest length of a cache that graphs are captured for. The next ones are 4 times as long.
const SHORTEST_CACHE: usize = 1024;

/// How a step lies on its device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StepLayout {
    /// Sizes, of rows that fill it up, too.
    pub(super) shape: BatchShape,
    /// Tokens that fill it up.
    pub(super) padding: usize,
    /// Rows of logits, those that fill them up included, where the step is captured.
    pub(super) logit_rows: usize,
    /// Whether its ops are captured, or replayed.
    pub(super) captured: bool,
}

impl StepLayout {
    /// A batch as it is.
    pub(super) fn exact(batch: &StepBatch, config: &RunnerConfig) -> Self {
        let queries = (0..batch.seqs()).map(|seq| batch.rows(seq).len());
        let longest = batch.kv_lens.iter().copied().max().unwrap_or(0) as usize;
        Self {
            shape: BatchShape {
                tokens: batch.tokens.len(),
                seqs: batch.seqs(),
                table_stride: config.max_blocks_per_seq(),
                max_query_len: queries.max().unwrap_or(0),
                max_kv_len: longest.next_power_of_two(),
            },
            padding: 0,
            logit_rows: 0,
            captured: false,
        }
    }

    /// A batch on a device that captures: filled up to a size of which there may be a graph, or as it is.
    pub(super) fn captured(batch: &StepBatch, config: &RunnerConfig) -> Self {
        let exact = Self::exact(batch, config);
        let shape = exact.shape;
        // A key has one adapter for all rows.
        let plain = batch.hidden_rows.is_empty() && batch.images.is_empty();
        let alike = plain && batch.adapters.windows(2).all(|pair| pair[0] == pair[1]);
        // A draft head reads all tokens that were accepted, and drafts what comes after the last.
        let (rows, of_head) = (batch.logit_rows.len(), !batch.features.is_empty());
        let decodes = match of_head {
            true => (1..=shape.seqs).contains(&rows),
            false => rows > 0 && rows == shape.tokens,
        };
        let kind = StepKind::of(batch);
        let counts = kind.aux_hidden.iter().map(|point| {
            let rows = batch.aux_hidden.iter().filter(|aux| aux.point == *point);
            rows.count()
        });
        let once = counts.max().unwrap_or(0) <= shape.tokens;
        if !alike || !decodes || !once || shape.max_query_len > MAX_QUERIES {
            return exact;
        }
        let (seqs, queries) = (
            captured_seqs(shape.seqs, config.max_seqs),
            captured_queries(shape.max_query_len),
        );
        let tokens = seqs * queries;
        let logit_rows = if of_head { seqs } else { tokens };
        let fits = tokens <= config.max_tokens
            && logit_rows <= config.max_logit_rows
            && queries <= config.context;
        // Drafts of very different lengths would be mostly padding.
        let padding = tokens - shape.tokens;
        if !fits || padding > shape.tokens || padding > 0 && reserved_blocks(config) == 0 {
            return exact;
        }
        Self {
            shape: BatchShape {
                tokens,
                seqs: slots(seqs, queries),
                max_query_len: queries,
                max_kv_len: captured_kv_len(shape.max_kv_len),
                ..shape
            },
            padding,
            logit_rows,
            captured: true,
        }
    }

    /// The rows of a captured step.
    pub(super) fn filled(&self) -> Option<usize> {
        self.captured.then_some(self.shape.tokens)
    }

    /// Steps with equal keys record the same ops over the same buffers, if `kind`, an index, and `chosen` are the same: whether
    /// tokens are chosen among them.
    fn key(&self, kind: usize, chosen: bool) -> GraphKey {
        let shape = self.shape;
        // Tokens of a sequence and kinds are below 2⁸, other sizes far below 2²⁰; the length is a power of two.
        (shape.tokens as u64) << 40
            | (kind as u64) << 24
            | (shape.max_query_len as u64) << 16
            | u64::from(shape.max_kv_len.ilog2()) << 8
            | u64::from(chosen)
    }
}

/// What the ops of a captured step depend on beside its sizes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StepKind {
    /// That of all sequences.
    adapter: Option<AdapterId>,
    /// Where hidden states of some rows are wanted.
    aux_hidden: Vec<AuxHiddenPoint>,
    features: FeatureSource,
}

impl StepKind {
    pub(super) fn of(batch: &StepBatch) -> Self {
        let mut aux_hidden = Vec::new();
        for aux in &batch.aux_hidden {
            if !aux_hidden.contains(&aux.point) {
                aux_hidden.push(aux.point);
            }
        }
        Self {
            adapter: batch.adapters.first().copied().flatten(),
            aux_hidden,
            features: batch.feature_source,
        }
    }
}

/// Sequences that a step of `seqs` is filled up to.
fn captured_seqs(seqs: usize, most: usize) -> usize {
    let size = match seqs {
        0..=8 => seqs.next_power_of_two(),
        n => n.next_multiple_of(8),
    };
    size.min(most)
}

/// Tokens of each of them: one, or one and a power of two.
pub(super) fn captured_queries(queries: usize) -> usize {
    match queries {
        0 | 1 => 1,
        n => 1 + (n - 1).next_power_of_two(),
    }
}

/// Places of sequences in such a step. Where those that are there have fewer tokens than others, there is room for as
/// many that fill it up.
fn slots(seqs: usize, queries: usize) -> usize {
    match queries {
        1 => seqs,
        _ => 2 * seqs,
    }
}

/// Most places of sequences on a device.
pub(super) fn max_slots(config: &RunnerConfig, captures: bool) -> usize {
    match captures {
        true => slots(config.max_seqs, MAX_QUERIES),
        false => config.max_seqs,
    }
}

/// The length of the cache that a step is captured for.
fn captured_kv_len(len: usize) -> usize {
    let mut size = SHORTEST_CACHE;
    while size < len {
        size *= 4;
    }
    size
}

/// Blocks in each pool of a device that captures that no sequence gets: those of padding. None where a block is a
/// whole context; then only steps that need none are captured.
pub(super) fn reserved_blocks(config: &RunnerConfig) -> usize {
    usize::from(config.layout != KvLayout::Contiguous)
}

/// How steps were run, and how many graphs there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GraphCounts {
    /// Steps that were captured.
    pub captured: u64,
    /// Steps that were replayed.
    pub replayed: u64,
    /// Graphs that were reset, to make room or because what they stood on is gone.
    pub reset: u64,
    /// Graphs that are there.
    pub held: usize,
}

/// The graphs of a stage.
#[derive(Default)]
pub(crate) struct Graphs {
    /// Keys, the one that was used last at the end.
    held: Vec<GraphKey>,
    /// By index, as keys have it.
    kinds: Vec<StepKind>,
    counts: GraphCounts,
    /// Whether something that graphs stand on is gone.
    stale: bool,
}

impl Graphs {
    pub(super) fn counts(&self) -> GraphCounts {
        GraphCounts {
            held: self.held.len(),
            ..self.counts
        }
    }

    /// Captures a step, or replays one of its layout.
    pub(super) fn run<B: BackendGraph>(
        &mut self,
        ctx: &mut B::Context,
        (layout, kind, chosen): (&StepLayout, StepKind, bool),
        body: &mut dyn FnMut(&mut B::Context) -> Result<()>,
    ) -> Result<()> {
        if self.stale || self.kinds.len() == MAX_KINDS && !self.kinds.contains(&kind) {
            self.reset::<B>(ctx)?;
        }
        let known = self.kinds.iter().position(|other| *other == kind);
        let kind = known.unwrap_or_else(|| {
            self.kinds.push(kind);
            self.kinds.len() - 1
        });
        let key = layout.key(kind, chosen);
        match self.held.iter().rposition(|held| *held == key) {
            Some(at) => self.held[at..].rotate_left(1),
            None => {
                if self.held.len() == MAX_GRAPHS {
                    let oldest = self.held.remove(0);
                    self.counts.reset += 1;
                    B::reset_graph(ctx, oldest)?;
                }
                self.held.push(key);
            }
        }
        match B::run_graph(ctx, key, body) {
            Ok(GraphRun::Captured) => self.counts.captured += 1,
            Ok(GraphRun::Replayed) => self.counts.replayed += 1,
            Ok(GraphRun::Immediate) => {}
            Err(error) => {
                self.held.pop();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Forgets all graphs: a buffer that they were captured over is another one now.
    pub(super) fn reset<B: BackendGraph>(&mut self, ctx: &mut B::Context) -> Result<()> {
        self.counts.reset += self.held.len() as u64;
        self.held.clear();
        self.kinds.clear();
        self.stale = false;
        B::reset_all_graphs(ctx)
    }

    /// The same before the next step that is captured or replayed.
    pub(crate) fn reset_later(&mut self) {
        self.stale = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrum_conformance::minimal::Minimal;
    use ferrum_kernels::Backend;
    use ferrum_types::Error;
    use std::collections::BTreeSet;

    fn layout(tokens: usize) -> StepLayout {
        StepLayout {
            shape: BatchShape {
                tokens,
                max_query_len: 1,
                max_kv_len: SHORTEST_CACHE,
                ..BatchShape::default()
            },
            ..StepLayout::default()
        }
    }

    fn kind(adapter: u32) -> StepKind {
        StepKind {
            adapter: Some(AdapterId(adapter)),
            aux_hidden: Vec::new(),
            features: FeatureSource::Target,
        }
    }

    #[test]
    fn kinds_have_graphs_of_their_own() {
        let device = Minimal::default();
        let mut ctx = device.new_context().unwrap();
        let mut graphs = Graphs::default();
        let mut replays = |graphs: &mut Graphs, adapter| {
            let before = graphs.counts().replayed;
            let step = (&layout(1), kind(adapter), true);
            graphs
                .run::<Minimal>(&mut ctx, step, &mut |_| Ok(()))
                .unwrap();
            graphs.counts().replayed > before
        };
        assert!(!replays(&mut graphs, 0) && !replays(&mut graphs, 1));
        assert!(replays(&mut graphs, 0) && replays(&mut graphs, 1));
        // What they stand on is gone.
        graphs.reset_later();
        assert!(!replays(&mut graphs, 1) && replays(&mut graphs, 1));
        assert_eq!((graphs.counts().held, graphs.counts().reset), (1, 2));
        // There is one number for each kind of those that are told apart.
        for adapter in 0..3 * MAX_KINDS as u32 {
            assert_eq!(replays(&mut graphs, adapter), adapter == 1, "{adapter}");
            assert!(replays(&mut graphs, adapter), "{adapter}");
            assert!(graphs.kinds.len() <= MAX_KINDS);
        }
    }

    #[test]
    fn the_oldest_graphs_make_room() {
        let device = Minimal::default();
        let mut ctx = device.new_context().unwrap();
        let mut graphs = Graphs::default();
        let mut run = |graphs: &mut Graphs, tokens| {
            let layout = layout(tokens);
            let before = graphs.counts();
            let step = (&layout, kind(0), true);
            let ran = graphs.run::<Minimal>(&mut ctx, step, &mut |_| Ok(()));
            ran.unwrap();
            graphs.counts().replayed - before.replayed
        };
        for tokens in 1..=MAX_GRAPHS {
            assert_eq!(run(&mut graphs, tokens), 0, "{tokens}");
        }
        // The first is used again, so the second is the oldest.
        assert_eq!(run(&mut graphs, 1), 1);
        assert_eq!(run(&mut graphs, 1000), 0);
        assert_eq!(run(&mut graphs, 1), 1);
        assert_eq!(run(&mut graphs, 2), 0);
        let counts = graphs.counts();
        assert_eq!((counts.held, counts.reset), (MAX_GRAPHS, 2));
        // Those that were reset were captured anew, and nothing else was.
        assert_eq!(counts.captured, MAX_GRAPHS as u64 + 2);
        graphs.reset::<Minimal>(&mut ctx).unwrap();
        assert_eq!(graphs.counts().held, 0);
        assert_eq!(graphs.counts().reset, 2 + MAX_GRAPHS as u64);
        let failed = graphs.run::<Minimal>(&mut ctx, (&layout(1), kind(0), true), &mut |_| {
            Err(Error::invalid("step", "it fails"))
        });
        assert!(failed.is_err());
        assert_eq!(graphs.counts().held, 0);
    }

    #[test]
    fn sizes_are_few_and_hold_what_they_are_for() {
        for most in [1, 5, 100, 256] {
            let sizes: BTreeSet<_> = (1..=most).map(|n| captured_seqs(n, most)).collect();
            assert!((1..=most).all(|n| captured_seqs(n, most) >= n));
            assert!(sizes.len() <= 4 + most.div_ceil(8), "{sizes:?}");
            assert_eq!(sizes.last(), Some(&most));
        }
        let sizes = [1, 2, 3, 4, 5, 6, 9, 10, 17].map(captured_queries);
        assert_eq!(sizes, [1, 2, 3, 5, 5, 9, 9, 17, 17]);
        let sizes = [1, 1024, 1025, 4096, 131_072].map(captured_kv_len);
        assert_eq!(sizes, [1024, 1024, 4096, 4096, 262_144]);
    }

    #[test]
    fn keys_differ_where_ops_do() {
        let mut keys = BTreeSet::new();
        let mut count = 0;
        for (tokens, max_query_len) in [(8, 1), (16, 1), (16, 2), (34, 17), (34, 2)] {
            for max_kv_len in [1024, 4096] {
                let kinds = [0, 1, MAX_KINDS - 1];
                let steps = kinds.map(|kind| [(kind, false), (kind, true)]);
                for (kind, chosen) in steps.into_iter().flatten() {
                    let shape = BatchShape {
                        tokens,
                        max_query_len,
                        max_kv_len,
                        ..BatchShape::default()
                    };
                    let layout = StepLayout {
                        shape,
                        ..StepLayout::default()
                    };
                    keys.insert(layout.key(kind, chosen));
                    count += 1;
                }
            }
        }
        assert_eq!(keys.len(), count);
    }
}
