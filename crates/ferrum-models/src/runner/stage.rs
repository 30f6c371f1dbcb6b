//! [`StageRunner`]: a range of layers on one device, with all that steps through them need there.
//!
//! It takes tokens, or the residual stream behind the layers before it, and leaves the stream behind its own. There is no
//! other way through the layers.

use super::config::RunnerConfig;
use super::read::read_floats;
use super::weights::BodyWeights;
use crate::batch::StepBatch;
use crate::cache::CacheGroup;
use crate::inventory::Stage;
use crate::layer::{Scratch, StepState, layer_forward};
use crate::lora::{AdapterLoader, Adapters, LoadedAdapter};
use crate::rope::{self, RopeTables};
use crate::spec::DecoderSpec;
use ferrum_kernels::{
    Backend, BackendKvDtype, BatchShape, DeviceBatch, KvCache, KvDtypeKind, LlmBackend,
    PagedKvShape, RowShape, Span,
};
use ferrum_types::{AdapterId, Error, FloatElement, Result};

/// What a step records behind the layers.
pub(super) type StageEnd<'a, B> =
    dyn FnMut(&mut <B as Backend>::Context, &StepState<'_, B>, &mut Scratch<B>) -> Result<()> + 'a;

/// Weights, KV pool and step state on one device.
pub(crate) struct StageRunner<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind> {
    /// The decoder with the layers of this stage alone.
    spec: DecoderSpec,
    config: RunnerConfig,
    /// The cache groups of the whole decoder.
    groups: Vec<CacheGroup>,
    pub(crate) ctx: B::Context,
    weights: BodyWeights<B>,
    pub(crate) kv: KvCache<B, K>,
    pub(super) scratch: Scratch<B>,
    adapters: Adapters<B>,
    rope: RopeTables<B>,
    pub(super) batch: DeviceBatch<B>,
    pub(super) staging: Staging<B>,
}

/// Host memory that is filled anew at each step.
pub(super) struct Staging<B: LlmBackend> {
    pub(super) ints: Vec<i32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    pub(super) activations: Vec<B::Act>,
    pub(super) residual: Vec<B::Residual>,
    pub(super) logits: Vec<B::Logit>,
}

impl<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind> StageRunner<B, K> {
    /// Allocates everything that steps of the given sizes need for a stage of the decoder `spec`.
    pub(super) fn new(
        device: &B,
        spec: &DecoderSpec,
        weights: BodyWeights<B>,
        config: RunnerConfig,
    ) -> Result<Self> {
        let groups = config.cache_groups(spec);
        let pools = config.layer_pools(spec)?;
        let pools = pools.get(weights.stage.layers());
        let pools = pools.ok_or_else(|| {
            let (found, layers) = (&weights.stage, spec.layers.len());
            let reason = format!("found layers {found} of a decoder with {layers}");
            Error::invalid("stage", reason)
        })?;
        let pools = pools.to_vec();
        let spec = weights.stage.spec(spec);
        let table_len = config.max_seqs * config.max_blocks_per_seq();
        let batch = DeviceBatch {
            shape: BatchShape::default(),
            tokens: device.alloc(config.max_tokens)?,
            rope_rows: device.alloc(config.max_tokens)?,
            token_seqs: device.alloc(config.max_tokens)?,
            query_starts: device.alloc(config.max_seqs + 1)?,
            kv_lens: device.alloc(config.max_seqs)?,
            block_tables: groups
                .iter()
                .map(|_| device.alloc(table_len))
                .collect::<Result<_>>()?,
        };
        let (rope, rope_staging) = if spec.rope.scaling.depends_on_length() {
            let tables = RopeTables::for_rows(device, &spec.rope, config.max_tokens)?;
            (tables, config.max_tokens * spec.rope.rot_dim / 2)
        } else {
            (
                RopeTables::for_positions(device, &spec.rope, config.context)?,
                0,
            )
        };
        Ok(Self {
            kv: KvCache::alloc(device, pools)?,
            scratch: Scratch::alloc(device, &spec, config.max_tokens, config.profile)?,
            adapters: Adapters::new(),
            staging: Staging {
                ints: Vec::with_capacity(config.max_tokens.max(table_len).max(config.max_seqs + 1)),
                cos: vec![0.0; rope_staging],
                sin: vec![0.0; rope_staging],
                activations: Vec::with_capacity(spec.hidden_size),
                residual: Vec::new(),
                logits: Vec::with_capacity(spec.vocab_size),
            },
            ctx: device.new_context()?,
            spec,
            config,
            groups,
            weights,
            rope,
            batch,
        })
    }

    /// Which layers these are.
    pub(super) fn stage(&self) -> &Stage {
        &self.weights.stage
    }

    /// The sizes that were allocated for.
    pub(super) fn config(&self) -> &RunnerConfig {
        &self.config
    }

    /// The KV pool of the first layer.
    pub(crate) fn pool(&self) -> PagedKvShape {
        match self.kv.layers.first() {
            Some(layer) => layer.shape,
            None => self.config.pool_shape(&self.spec),
        }
    }

    /// The cache groups of the whole decoder.
    pub(crate) fn cache_groups(&self) -> &[CacheGroup] {
        &self.groups
    }

    /// Records a step over what was uploaded, and behind the layers what `end` adds. A steady step of so many logit
    /// rows may be replayed where `captured` says how many there are.
    pub(super) fn compute(
        &mut self,
        batch: &StepBatch,
        captured: Option<usize>,
        end: &mut StageEnd<'_, B>,
    ) -> Result<()> {
        let adapted = self.adapters.plan(batch);
        let Self {
            ctx,
            spec,
            config,
            weights,
            kv,
            scratch,
            adapters,
            rope,
            batch: state,
            ..
        } = self;
        let mut body = |ctx: &mut B::Context| {
            let step = StepState {
                spec,
                batch: state,
                rope,
                adapters,
            };
            forward(ctx, weights, kv, &step, scratch)?;
            end(ctx, &step, scratch)
        };
        let shape = state.shape;
        let decodes = shape.max_query_len == 1 && shape.seqs == shape.tokens;
        // What adapters add depends on which rows want them, which no key says. Collectives may go through the host,
        // where a replay would leave them out.
        let alone = B::world_size(ctx) == 1;
        match captured {
            Some(logit_rows) if decodes && alone && !adapted && !config.profile => {
                B::run_graph(ctx, graph_key(shape, logit_rows), &mut body)?;
                Ok(())
            }
            _ => body(ctx),
        }
    }

    /// See [`ModelRunner::take_spans`](super::ModelRunner::take_spans).
    pub(super) fn take_spans(&mut self) -> Result<Vec<Span>> {
        self.scratch.profiler.take_spans(&mut self.ctx)
    }

    /// What loads LoRA adapters for these layers.
    pub(super) fn adapter_loader(&self) -> AdapterLoader<B> {
        AdapterLoader {
            device: B::device(&self.ctx).clone(),
            cut: self.weights.cut.clone(),
            stage: self.weights.stage.clone(),
            earlier: Vec::new(),
        }
    }

    /// Takes a LoRA adapter of this stage's [`adapter_loader`](Self::adapter_loader).
    pub(super) fn add_adapter(&mut self, id: AdapterId, adapter: LoadedAdapter<B>) -> Result<()> {
        let (device, most) = (B::device(&self.ctx), self.config.max_tokens);
        let lora = &mut self.scratch.lora;
        self.adapters
            .insert(device, &self.spec, most, (id, adapter), lora)
    }

    /// Forgets an adapter; whether it was there.
    pub(super) fn unload_adapter(&mut self, id: AdapterId) -> bool {
        self.adapters.unload(id)
    }

    /// The first adapter of a batch that is not there.
    pub(super) fn missing_adapter(&self, batch: &StepBatch) -> Option<AdapterId> {
        self.adapters.missing(batch)
    }

    /// Writes the residual stream behind the stage before this one, `[tokens, hidden]`, of a batch that was uploaded.
    pub(super) fn write_stream(&mut self, stream: &[f32]) -> Result<()> {
        let staging = &mut self.staging.residual;
        staging.clear();
        staging.extend(stream.iter().map(|&x| B::Residual::from_f32(x)));
        B::write(&mut self.ctx, &mut self.scratch.residual, 0, staging)
    }

    /// Waits for the residual stream behind this stage, `[tokens, hidden]`, of the batch that was computed.
    pub(super) fn read_stream(&mut self, stream: &mut Vec<f32>) -> Result<()> {
        let len = self.batch.shape.tokens * self.spec.hidden_size;
        stream.resize(len, 0.0);
        let (ctx, staging) = (&mut self.ctx, &mut self.staging.residual);
        read_floats::<B, _>(ctx, (&self.scratch.residual, 0), staging, stream)
    }

    /// Writes the batch's arrays to the device.
    pub(super) fn upload(&mut self, batch: &StepBatch) -> Result<()> {
        let seqs = batch.seqs();
        let rows = |seq: usize| batch.rows(seq).len();
        let tables = 0..seqs;
        let (_, block_size) = self.config.blocks();
        let blocks_of = |seq: usize| (batch.kv_lens[seq] as usize).div_ceil(block_size);
        let longest = batch.kv_lens.iter().copied().max().unwrap_or(0) as usize;
        let shape = BatchShape {
            tokens: batch.tokens.len(),
            seqs,
            table_stride: self.config.max_blocks_per_seq(),
            max_query_len: (0..seqs).map(rows).max().unwrap_or(0),
            max_kv_len: longest.next_power_of_two(),
        };
        self.batch.shape = shape;
        let (ctx, ints, state) = (&mut self.ctx, &mut self.staging.ints, &mut self.batch);
        if self.weights.stage.is_first() {
            let tokens = batch.tokens.iter().map(|&t| t as i32);
            write_ints::<B>(ctx, &mut state.tokens, ints, tokens)?;
        }
        let seq_of_token = tables
            .clone()
            .flat_map(|s| std::iter::repeat_n(s as i32, rows(s)));
        write_ints::<B>(ctx, &mut state.token_seqs, ints, seq_of_token)?;
        let starts = batch.query_starts.iter().map(|&s| s as i32);
        write_ints::<B>(ctx, &mut state.query_starts, ints, starts)?;
        let lens = batch.kv_lens.iter().map(|&n| n as i32);
        write_ints::<B>(ctx, &mut state.kv_lens, ints, lens)?;
        for (group, device_tables) in state.block_tables.iter_mut().enumerate() {
            // Other stages have the layers that would look at it.
            if !self.kv.layers.iter().any(|layer| layer.group == group) {
                continue;
            }
            let padded = tables.clone().flat_map(|s| {
                let table = &batch.table(group, s)[..blocks_of(s)];
                let padding = std::iter::repeat_n(0, shape.table_stride - table.len());
                table.iter().map(|b| b.0 as i32).chain(padding)
            });
            write_ints::<B>(ctx, device_tables, ints, padded)?;
        }
        if self.spec.rope.scaling.depends_on_length() {
            self.upload_rope_rows(batch)
        } else {
            let rows = batch.positions.iter().map(|&p| p as i32);
            write_ints::<B>(ctx, &mut state.rope_rows, ints, rows)
        }
    }

    /// For length-dependent RoPE: a table with one row for each token of this step.
    ///
    /// A prompt's tokens take the frequencies of the prompt's whole length, later tokens those of the
    /// length up to and including themselves. So the result depends neither on chunks nor on whether
    /// a sequence was recomputed.
    fn upload_rope_rows(&mut self, batch: &StepBatch) -> Result<()> {
        let half = self.spec.rope.rot_dim / 2;
        let mut computed: Option<(usize, Vec<f32>)> = None;
        for seq in 0..batch.seqs() {
            for row in batch.rows(seq) {
                let position = batch.positions[row];
                let length = (position as usize + 1).max(batch.prompt_lens[seq] as usize);
                let frequencies = match &mut computed {
                    Some((n, frequencies)) if *n == length => frequencies,
                    other => {
                        &mut other
                            .insert((length, rope::frequencies(&self.spec.rope, length)))
                            .1
                    }
                };
                let at = row * half..(row + 1) * half;
                let cos = &mut self.staging.cos[at.clone()];
                rope::fill_row(
                    &self.spec.rope,
                    frequencies,
                    position,
                    cos,
                    &mut self.staging.sin[at],
                );
            }
        }
        let len = batch.tokens.len() * half;
        B::write(
            &mut self.ctx,
            &mut self.rope.cos,
            0,
            &self.staging.cos[..len],
        )?;
        B::write(
            &mut self.ctx,
            &mut self.rope.sin,
            0,
            &self.staging.sin[..len],
        )?;
        let rows = 0..batch.tokens.len() as i32;
        write_ints::<B>(
            &mut self.ctx,
            &mut self.batch.rope_rows,
            &mut self.staging.ints,
            rows,
        )
    }
}

pub(super) fn write_ints<B: LlmBackend>(
    ctx: &mut B::Context,
    dst: &mut B::Buffer<i32>,
    staging: &mut Vec<i32>,
    values: impl Iterator<Item = i32>,
) -> Result<()> {
    staging.clear();
    staging.extend(values);
    B::write(ctx, dst, 0, staging)
}

/// Steps with equal keys record the same ops over the same buffers.
fn graph_key(shape: BatchShape, logit_rows: usize) -> u64 {
    // Sizes of a decode step are far below 2²⁰ rows; the rounded length is a power of two.
    (shape.tokens as u64) << 40 | (logit_rows as u64) << 8 | u64::from(shape.max_kv_len.ilog2())
}

/// Embeds the batch's tokens, where this is the first stage, and runs all its layers; the last layer's output is pending in
/// `delta`.
fn forward<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind>(
    ctx: &mut B::Context,
    weights: &BodyWeights<B>,
    kv: &mut KvCache<B, K>,
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    let shape = RowShape {
        rows: step.batch.shape.tokens,
        dim: step.spec.hidden_size,
    };
    let tokens = &step.batch.tokens;
    let Scratch {
        residual, profiler, ..
    } = scratch;
    if let Some(embedding) = &weights.embedding {
        // [tokens] → [tokens, hidden]
        profiler.measure(ctx, "embedding", |ctx| {
            embedding.lookup(ctx, tokens, residual, shape)
        })?;
    }
    let layers = step
        .spec
        .layers
        .iter()
        .zip(&weights.layers)
        .zip(&mut kv.layers);
    for (index, (layer, kv)) in layers.enumerate() {
        layer_forward::<B, K>(ctx, index, layer, kv, step, scratch)?;
    }
    Ok(())
}
