//! [`StageRunner`]: a range of layers on one device, with all that steps through them need there.
//!
//! It takes tokens, or the residual stream behind the layers before it, and leaves the stream behind its own. There is no
//! other way through the layers.

use super::aux_hidden::AuxHiddenStates;
use super::caches::{CacheIndex, StageCaches};
use super::config::RunnerConfig;
use super::floats::{read_floats, room};
use super::graphs::{Graphs, MAX_QUERIES, StepKind, StepLayout, max_slots, reserved_blocks};
use super::upload::{self, PackedStep, TableCopy};
use super::weights::BodyWeights;
use crate::batch::{AuxHiddenPoint, StepBatch};
use crate::cache::CacheGroup;
use crate::images::StepImages;
use crate::inventory::Stage;
use crate::kv_layer::{AllocKvCache, AnyKvCache};
use crate::layer::{
    CacheMut, DraftBuffers, LayerStates, Scratch, StepState, draft_input, layer_forward,
    layer_input, per_layer_inputs,
};
use crate::lora::{AdapterLoader, Adapters, LoadedAdapter};
use crate::readback::StepOutput;
use crate::rope::{self, RopeTables};
use crate::spec::DecoderSpec;
use ferrum_kernels::{
    Backend, BatchShape, DeviceBatch, HostBuffer, LlmBackend, PagedKvShape, RowShape, Span,
};
use ferrum_types::{AdapterId, BlockId, Error, FloatElement, Result, StateSlot};

/// What a step records behind the layers.
pub(super) type StageEnd<'a, B> = dyn FnMut(
        &mut <B as Backend>::Context,
        &StepState<'_, B>,
        &mut Scratch<B>,
        &mut AuxHiddenStates<B>,
    ) -> Result<()>
    + 'a;

/// Weights, KV pool and step state on one device.
pub(crate) struct StageRunner<B: LlmBackend> {
    /// The decoder with the layers of this stage alone.
    spec: DecoderSpec,
    config: RunnerConfig,
    /// The cache groups of the whole decoder.
    groups: Vec<CacheGroup>,
    pub(crate) ctx: B::Context,
    weights: BodyWeights<B>,
    pub(crate) kv: AnyKvCache<B>,
    /// Recurrent states of the layers that have one: those of the slots, where the device captures that of rows that
    /// no sequence reads, and zeros.
    pub(crate) states: Vec<LayerStates<B>>,
    /// Where each layer keeps what it has seen.
    cache_of: Vec<CacheIndex>,
    pub(super) scratch: Scratch<B>,
    /// What steps give beside logits, once one has wanted some.
    pub(super) aux_hidden: AuxHiddenStates<B>,
    /// Of a draft head.
    draft: Option<DraftBuffers<B>>,
    adapters: Adapters<B>,
    /// Those of the last step that had some.
    images: Option<StepImages<B>>,
    /// Of each rotary embedding of the spec.
    ropes: Vec<RopeTables<B>>,
    pub(super) batch: DeviceBatch<B>,
    /// How the step that was packed last lies on the device.
    pub(super) layout: StepLayout,
    pub(super) packed: PackedStep,
    /// Whether it was uploaded.
    sent: bool,
    /// By cache group.
    tables: Vec<TableCopy>,
    /// Whether the device captures.
    captures: bool,
    pub(super) graphs: Graphs,
    pub(super) staging: Staging<B>,
}

/// Host memory that is filled anew at each step; what grows does so when it is first needed.
pub(super) struct Staging<B: LlmBackend> {
    pub(super) tokens: HostBuffer<i32>,
    cos: HostBuffer<f32>,
    sin: HostBuffer<f32>,
    pub(super) activations: HostBuffer<B::Act>,
    pub(super) residual: HostBuffer<B::Residual>,
    pub(super) logits: HostBuffer<B::Logit>,
}

impl<B: LlmBackend> StageRunner<B> {
    /// Allocates everything that steps of the given sizes need for a stage of the decoder `spec`, its pools by `alloc`.
    pub(super) fn new(
        device: &B,
        spec: &DecoderSpec,
        weights: BodyWeights<B>,
        config: RunnerConfig,
        alloc: AllocKvCache<B>,
    ) -> Result<Self> {
        let groups = config.cache_groups(spec);
        let caches = config.layer_caches(spec);
        let StageCaches {
            pools,
            states,
            cache_of,
        } = StageCaches::of(&weights.stage, &caches)?;
        // Ops on states may go through the host, where a replay would leave them out.
        let captures = device.captures() && (states.is_empty() || device.records_states());
        let state_rows = config.state_rows(spec) + usize::from(captures);
        let state = |elements| LayerStates::alloc(device, state_rows, elements);
        let states = states.into_iter().map(state).collect::<Result<Vec<_>>>()?;
        let spec = weights.stage.spec(spec);
        let reserved = usize::from(captures) * reserved_blocks(&config);
        let pools = pools.into_iter().map(|(group, shape)| {
            let blocks = shape.blocks + reserved;
            (group, PagedKvShape { blocks, ..shape })
        });
        let (slots, stride) = (max_slots(&config, captures), config.max_blocks_per_seq());
        let batch = DeviceBatch {
            shape: BatchShape::default(),
            tokens: device.alloc(config.max_tokens)?,
            rope_rows: device.alloc(config.max_tokens)?,
            query_starts: device.alloc(slots + 1)?,
            kv_lens: device.alloc(slots)?,
            state_slots: device.alloc(if states.is_empty() { 0 } else { slots })?,
            block_tables: groups
                .iter()
                .map(|_| device.alloc(slots * stride))
                .collect::<Result<_>>()?,
        };
        let per_token = spec.depends_on_length();
        let widest = spec.ropes.iter().map(|rope| rope.rot_dim / 2).max();
        let rope_staging = usize::from(per_token) * config.max_tokens * widest.unwrap_or(0);
        let tables = |rope| match per_token {
            true => RopeTables::for_rows(device, rope, config.max_tokens),
            false => RopeTables::for_positions(device, rope, config.context),
        };
        let ropes = spec.ropes.iter().map(tables).collect::<Result<_>>()?;
        let mut scratch = Scratch::alloc(device, &spec, config.max_tokens, config.profile)?;
        let sizes = (config.max_tokens, spec.hidden_size);
        let draft = weights.draft.as_ref();
        let draft = draft.map(|input| DraftBuffers::alloc(device, input, sizes, &mut scratch));
        Ok(Self {
            kv: alloc(device, pools.collect())?,
            states,
            cache_of,
            scratch,
            aux_hidden: AuxHiddenStates::new(spec.hidden_size, config.max_tokens),
            draft: draft.transpose()?,
            adapters: Adapters::new(),
            images: None,
            staging: Staging {
                tokens: device.host_buffer(config.max_logit_rows)?,
                cos: device.host_buffer(rope_staging)?,
                sin: device.host_buffer(rope_staging)?,
                activations: device.host_buffer(spec.hidden_size)?,
                residual: device.host_buffer(0)?,
                logits: device.host_buffer(spec.vocab_size)?,
            },
            ctx: device.new_context()?,
            layout: StepLayout::default(),
            packed: PackedStep::default(),
            sent: true,
            tables: groups
                .iter()
                .map(|_| TableCopy::new(slots, stride))
                .collect(),
            captures: captures && !config.profile,
            graphs: Graphs::default(),
            spec,
            config,
            groups,
            weights,
            ropes,
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

    /// The cache groups of the whole decoder.
    pub(crate) fn cache_groups(&self) -> &[CacheGroup] {
        &self.groups
    }

    /// Records a step over what was uploaded, and behind the layers what `end` adds; whether it chooses tokens says
    /// `chosen`. Where the layout is one of those that are captured, the step may be replayed.
    pub(super) fn compute(
        &mut self,
        batch: &StepBatch,
        chosen: bool,
        end: &mut StageEnd<'_, B>,
    ) -> Result<()> {
        if !batch.images.is_empty() {
            let tables = (&*self.groups, self.batch.shape.table_stride);
            let old = self.images.take();
            self.images = Some(StepImages::upload(&mut self.ctx, old, batch, tables)?);
        }
        self.copy_states(
            batch
                .state_inits
                .iter()
                .map(|start| (start.from, start.slot)),
        )?;
        self.record(batch, chosen, end)?;
        self.copy_states(batch.state_keeps.iter().map(|&(from, to)| (Some(from), to)))
    }

    /// Copies states from slot to slot, from none: zeros.
    fn copy_states(
        &mut self,
        copies: impl Iterator<Item = (Option<StateSlot>, StateSlot)>,
    ) -> Result<()> {
        let Some(first) = self.states.first() else {
            return Ok(());
        };
        let zeros = first.shape.slots - 1;
        let row = |slot: StateSlot| slot.0 as usize;
        let copies: Vec<_> = copies
            .map(|(from, to)| (from.map_or(zeros, row), row(to)))
            .collect();
        if copies.is_empty() {
            return Ok(());
        }
        for LayerStates { states, shape } in &mut self.states {
            B::copy_states(&mut self.ctx, states, &copies, *shape)?;
        }
        Ok(())
    }

    /// Records a step between its copies of states.
    fn record(&mut self, batch: &StepBatch, chosen: bool, end: &mut StageEnd<'_, B>) -> Result<()> {
        self.adapters.plan(batch, self.layout.filled());
        let Self {
            ctx,
            spec,
            weights,
            kv,
            states,
            cache_of,
            scratch,
            aux_hidden,
            draft,
            adapters,
            images,
            ropes,
            batch: state,
            layout,
            graphs,
            ..
        } = self;
        let mut body = |ctx: &mut B::Context| {
            let step = StepState {
                spec,
                batch: state,
                ropes,
                adapters,
                images: images.as_ref().filter(|_| !batch.images.is_empty()),
            };
            let caches = (&mut *kv, &mut **states, &**cache_of);
            let ends = (&mut *aux_hidden, draft.as_mut());
            forward(ctx, weights, caches, &step, scratch, ends)?;
            end(ctx, &step, scratch, aux_hidden)
        };
        match layout.captured {
            true => graphs.run::<B>(ctx, (layout, StepKind::of(batch), chosen), &mut body),
            false => body(ctx),
        }
    }

    /// See [`DecoderRunner::take_spans`](super::DecoderRunner::take_spans).
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
        let device = (device, &mut self.graphs);
        self.adapters
            .insert(device, &self.spec, most, (id, adapter), lora)
    }

    /// Forgets an adapter; whether it was there.
    pub(super) fn unload_adapter(&mut self, id: AdapterId) -> bool {
        let was_there = self.adapters.unload(id);
        if was_there {
            self.graphs.reset_later();
        }
        was_there
    }

    /// The first adapter of a batch that is not there.
    pub(super) fn missing_adapter(&self, batch: &StepBatch) -> Option<AdapterId> {
        self.adapters.missing(batch)
    }

    /// Writes the residual stream behind the stage before this one, `[tokens, hidden]`, of a batch that was uploaded.
    pub(super) fn write_stream(&mut self, stream: &[f32]) -> Result<()> {
        let device = B::device(&self.ctx);
        let staging = room(device, &mut self.staging.residual, stream.len())?;
        for (to, x) in staging.iter_mut().zip(stream) {
            *to = B::Residual::from_f32(*x);
        }
        B::write(&mut self.ctx, &mut self.scratch.residual, 0, staging)
    }

    /// Waits for the residual stream behind this stage, `[tokens, hidden]`, of the batch that was computed.
    pub(super) fn read_stream(&mut self, stream: &mut Vec<f32>) -> Result<()> {
        let tokens = self.batch.shape.tokens - self.layout.padding;
        stream.resize(tokens * self.spec.hidden_size, 0.0);
        let (ctx, staging) = (&mut self.ctx, &mut self.staging.residual);
        read_floats::<B, _>(ctx, (&self.scratch.residual, 0), staging, stream)
    }

    /// Packs the batch's arrays, filled up where the device captures steps of its kind. What is packed goes up with
    /// [`send`](Self::send).
    pub(super) fn pack(&mut self, batch: &StepBatch) -> Result<()> {
        // The same holds for collectives, of which a rank knows more when it has joined its group.
        self.layout = match self.captures && B::records_collectives(&self.ctx) {
            true => StepLayout::captured(batch, &self.config),
            false => StepLayout::exact(batch, &self.config),
        };
        let shape = self.layout.shape;
        self.batch.shape = shape;
        if !std::mem::replace(&mut self.sent, false) {
            // It is unknown what of the last step has reached the device.
            self.tables.iter_mut().for_each(TableCopy::forget);
        }
        let packed = &mut self.packed;
        packed.clear();
        let (seqs, padding) = (batch.seqs(), self.layout.padding);
        let fill = |value: i32| std::iter::repeat_n(value, padding);
        match self.weights.stage.is_first() {
            true => packed.push(batch.tokens.iter().map(|&t| t as i32).chain(fill(0))),
            false => packed.push([]),
        }
        if self.spec.depends_on_length() {
            packed.push((0..batch.tokens.len() as i32).chain(fill(0)));
        } else {
            packed.push(batch.positions.iter().map(|&p| p as i32).chain(fill(0)));
        }
        // Tokens of each sequence that fills up, as many as one may have, until there are no more.
        let most = shape.max_query_len;
        let first = batch.tokens.len();
        let filled = |slot: usize| first + padding.min((slot - seqs) * most);
        let others = seqs..shape.seqs;
        let len = |slot: usize| filled(slot + 1) - filled(slot);
        let starts = batch.query_starts.iter().map(|&s| s as i32);
        packed.push(starts.chain(others.clone().map(|slot| filled(slot + 1) as i32)));
        let lens = batch.kv_lens.iter().map(|&n| n as i32);
        packed.push(lens.chain(others.clone().map(|slot| len(slot) as i32)));
        match self.states.first() {
            // Before the zeros is the slot of those that fill up.
            Some(layer) => {
                let reserved = layer.shape.slots as i32 - 2;
                let slots = batch.state_slots.iter().map(|slot| slot.0 as i32);
                packed.push(slots.chain(others.clone().map(|_| reserved)));
            }
            None => packed.push([]),
        }
        let (_, block_size) = self.config.blocks();
        for (group, tables) in self.tables.iter_mut().enumerate() {
            // Other stages may have the layers that would look at it.
            if self.kv.layers.iter().any(|layer| layer.group() == group) {
                for seq in 0..seqs {
                    let blocks = (batch.kv_lens[seq] as usize).div_ceil(block_size);
                    tables.update(seq, &batch.table(group, seq)[..blocks], packed);
                }
                let reserved = [BlockId(self.groups[group].blocks as u32); MAX_QUERIES];
                for slot in others.clone().filter(|&slot| len(slot) > 0) {
                    let blocks = len(slot).div_ceil(block_size);
                    tables.update(slot, &reserved[..blocks], packed);
                }
            }
            TableCopy::end(packed);
        }
        let (stage, last) = (&self.weights.stage, self.weights.stage.is_last());
        let layers = stage.layers();
        // The end of an earlier stage is the stream that it hands over.
        let has = |point| match point {
            AuxHiddenPoint::Layer(layer) => {
                layers.contains(&(layer as usize)) && (last || layer as usize + 1 < layers.end)
            }
            AuxHiddenPoint::FinalNorm => last,
        };
        let device = B::device(&self.ctx);
        let (rows, to) = ((batch, self.layout.filled()), (packed, &mut self.graphs));
        self.aux_hidden.pack(device, rows, has, to)?;
        match self.spec.depends_on_length() {
            true => self.upload_rope_rows(batch),
            false => Ok(()),
        }
    }

    /// Holds the features of a batch against what these layers take: hidden states for each token where they are those of
    /// a draft head, else none.
    pub(super) fn check_features(&self, batch: &StepBatch) -> Result<()> {
        let input = self.weights.draft.as_ref();
        let width = input.map_or(0, |input| {
            input.width(batch.feature_source, self.spec.hidden_size)
        });
        let (found, tokens) = (batch.features.len(), batch.tokens.len());
        if found == tokens * width {
            return Ok(());
        }
        let reason = format!(
            "{found} numbers of hidden states for {tokens} tokens, expected {width} for each"
        );
        Err(Error::invalid("step", reason))
    }

    /// Tokens that may go in, of a model with `vocab` that come out.
    pub(super) fn input_vocab(&self, vocab: usize) -> usize {
        let draft = self.weights.draft.as_ref();
        draft.map_or(vocab, |input| input.vocab_size)
    }

    /// Uploads the features of a batch, if it has some.
    pub(super) fn write_features(&mut self, batch: &StepBatch) -> Result<()> {
        match &mut self.draft {
            Some(draft) => {
                let (features, padding) = (&batch.features, self.layout.padding);
                let rows = (batch.tokens.len(), padding);
                draft.write(&mut self.ctx, features, batch.feature_source, rows)
            }
            None => Ok(()),
        }
    }

    /// Waits for the auxiliary hidden states of the batch that was computed.
    pub(super) fn read_aux_hidden(
        &mut self,
        batch: &StepBatch,
        output: &mut StepOutput,
    ) -> Result<()> {
        let Staging {
            activations,
            residual,
            ..
        } = &mut self.staging;
        let staging = (activations, residual);
        self.aux_hidden.read(&mut self.ctx, staging, batch, output)
    }

    /// Uploads what was packed; what was packed for other buffers goes to `others`.
    pub(super) fn send<'b>(
        &'b mut self,
        others: impl IntoIterator<Item = &'b mut B::Buffer<i32>>,
    ) -> Result<()> {
        let buffers = upload::buffers(&mut self.batch);
        let buffers = buffers.chain(self.aux_hidden.buffers()).chain(others);
        self.packed.send::<B>(&mut self.ctx, buffers)?;
        self.sent = true;
        Ok(())
    }

    /// For length-dependent RoPE: a table with one row for each token of this step.
    ///
    /// A prompt's tokens take the frequencies of the prompt's whole length, later tokens those of the
    /// length up to and including themselves. So the result depends neither on chunks nor on whether
    /// a sequence was recomputed.
    fn upload_rope_rows(&mut self, batch: &StepBatch) -> Result<()> {
        for (spec, tables) in self.spec.ropes.iter().zip(&mut self.ropes) {
            let half = spec.rot_dim / 2;
            let mut computed: Option<(usize, Vec<f32>)> = None;
            for seq in 0..batch.seqs() {
                for row in batch.rows(seq) {
                    let position = batch.positions[row];
                    let length = (position as usize + 1).max(batch.prompt_lens[seq] as usize);
                    let frequencies = match &mut computed {
                        Some((n, frequencies)) if *n == length => frequencies,
                        other => &mut other.insert((length, rope::frequencies(spec, length))).1,
                    };
                    let at = row * half..(row + 1) * half;
                    let cos = &mut self.staging.cos[at.clone()];
                    let sin = &mut self.staging.sin[at];
                    rope::fill_row(spec, frequencies, position, cos, sin);
                }
            }
            let len = batch.tokens.len() * half;
            B::write(&mut self.ctx, &mut tables.cos, 0, &self.staging.cos[..len])?;
            B::write(&mut self.ctx, &mut tables.sin, 0, &self.staging.sin[..len])?;
        }
        Ok(())
    }
}

/// Embeds the batch's tokens, where this is the first stage, and runs all its layers; the last layer's output is pending in
/// `delta`.
fn forward<B: LlmBackend>(
    ctx: &mut B::Context,
    weights: &BodyWeights<B>,
    (kv, states, cache_of): (&mut AnyKvCache<B>, &mut [LayerStates<B>], &[CacheIndex]),
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
    (aux_hidden, draft): (&mut AuxHiddenStates<B>, Option<&mut DraftBuffers<B>>),
) -> Result<()> {
    scratch.begin_step();
    embed(ctx, weights, step, scratch)?;
    if let Some(tables) = &weights.per_layer {
        per_layer_inputs(ctx, tables, step, scratch)?;
    }
    // Whether the first layer has its input.
    let mut ready = match (&weights.draft, draft) {
        (Some(input), Some(buffers)) => draft_input(ctx, input, step, scratch, buffers)?,
        _ => false,
    };
    let (first, has_aux) = (weights.stage.layers().start, aux_hidden.any());
    let layers = step.spec.layers.iter().zip(&weights.layers).zip(cache_of);
    for (index, (layer, place)) in layers.enumerate() {
        let cache = match *place {
            CacheIndex::Pool(pool) => CacheMut::Pool(&mut *kv.layers[pool]),
            CacheIndex::State(state) => CacheMut::State(&mut states[state]),
            CacheIndex::None => CacheMut::None,
        };
        if !std::mem::take(&mut ready) {
            layer_input(ctx, index, layer.1, step, scratch)?;
        }
        if has_aux && index > 0 {
            // Now the stream is that behind the layer before.
            let stream = (&scratch.residual, &mut scratch.profiler);
            aux_hidden.take_stream(ctx, first + index - 1, stream)?;
        }
        layer_forward(ctx, index, layer, cache, step, scratch)?;
    }
    Ok(())
}

/// Embeds the batch's tokens, where this is the first stage.
fn embed<B: LlmBackend>(
    ctx: &mut B::Context,
    weights: &BodyWeights<B>,
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    let shape = RowShape {
        rows: step.batch.shape.tokens,
        dim: step.spec.hidden_size,
    };
    let tokens = &step.batch.tokens;
    let Scratch {
        residual,
        positions,
        profiler,
        ..
    } = scratch;
    if let Some(embedding) = &weights.embedding {
        // [tokens] → [tokens, hidden]
        profiler.measure(ctx, "embedding", |ctx| {
            embedding.lookup(ctx, tokens, residual, shape)?;
            let (scale, len) = (step.spec.scales.embedding, shape.rows * shape.dim);
            if scale != 1.0 {
                B::scale_inplace(ctx, residual, scale, len)?;
            }
            match &weights.positions {
                Some(table) => {
                    table.lookup(ctx, &step.batch.rope_rows, positions, shape)?;
                    B::add_inplace(ctx, residual, positions, len)
                }
                None => Ok(()),
            }
        })?;
        if let Some(images) = step.images {
            images.place(ctx, residual, shape.dim)?;
        }
    }
    Ok(())
}
