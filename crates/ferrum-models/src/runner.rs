//! [`ModelRunner`]: owns weights, KV pool and scratch, and runs one step of the forward path.

mod read;

use crate::batch::{ChosenToken, StepBatch};
use crate::inventory::RankCut;
use crate::layer::{LayerWeights, Scratch, StepState, layer_forward};
use crate::linear::{Embedding, Linear};
use crate::lora::{AdapterLoader, Adapters, LoadedAdapter};
use crate::readback::{Readback, StepOutput, Ticket};
use crate::rope::{self, RopeTables};
use crate::spec::DecoderSpec;
use ferrum_formats::LoraFolder;
use ferrum_kernels::{
    Act, BackendKvDtype, BatchShape, DeviceBatch, KvCache, KvDtypeKind, KvFp16, LlmBackend,
    NormShape, PagedKvShape, RowShape, Span,
};
use ferrum_types::{AdapterId, Error, Result};
use read::{Choices, SubmittedStep, WantedRows, is_logits, is_sampled, is_token};
use std::collections::VecDeque;

/// How the KV pool is cut into blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvLayout {
    /// Blocks of this many tokens.
    Paged {
        /// Tokens in a block.
        block_size: usize,
    },
    /// One block of the whole context for each sequence.
    Contiguous,
}

/// Sizes that a runner allocates for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunnerConfig {
    /// Longest sequence.
    pub context: usize,
    /// Most sequences in a step.
    pub max_seqs: usize,
    /// Most tokens in a step.
    pub max_tokens: usize,
    /// Most rows of logits in a step.
    pub max_logit_rows: usize,
    /// Tokens that the KV pool holds over all sequences (rounded up to blocks).
    pub kv_tokens: usize,
    /// Blocks.
    pub layout: KvLayout,
    /// Whether each op is measured, for [`ModelRunner::take_spans`]. Steps are then not captured.
    pub profile: bool,
}

impl RunnerConfig {
    /// One sequence of up to `context` tokens, prompts in chunks of at most 512.
    pub fn single(context: usize) -> Self {
        Self {
            context,
            max_seqs: 1,
            max_tokens: context.clamp(1, 512),
            max_logit_rows: 1,
            kv_tokens: context,
            layout: KvLayout::Paged { block_size: 32 },
            profile: false,
        }
    }

    /// The pool of one layer.
    pub fn pool_shape(&self, spec: &DecoderSpec) -> PagedKvShape {
        let (kv_heads, head_dim) = spec.kv_heads_and_dim();
        let (blocks, block_size) = match self.layout {
            KvLayout::Paged { block_size } => {
                (self.kv_tokens.div_ceil(block_size.max(1)), block_size)
            }
            KvLayout::Contiguous => (self.max_seqs, self.context),
        };
        PagedKvShape {
            blocks,
            block_size,
            kv_heads,
            head_dim,
        }
    }

    fn max_blocks_per_seq(&self) -> usize {
        match self.layout {
            KvLayout::Paged { block_size } => self.context.div_ceil(block_size.max(1)),
            KvLayout::Contiguous => 1,
        }
    }

    fn validate(&self) -> Result<()> {
        let block_size = match self.layout {
            KvLayout::Paged { block_size } => block_size,
            KvLayout::Contiguous => 1,
        };
        let sizes = [
            ("context", self.context),
            ("sequences", self.max_seqs),
            ("tokens of a step", self.max_tokens),
            ("rows of logits", self.max_logit_rows),
            ("tokens of the KV cache", self.kv_tokens),
            ("tokens of a block", block_size),
        ];
        let wrong = |&&(_, n): &&(&str, usize)| n == 0 || n > i32::MAX as usize;
        match sizes.iter().find(wrong) {
            None => Ok(()),
            Some((name, n)) => {
                let reason = format!("{name}: found {n}, expected 1 to {}", i32::MAX);
                Err(Error::invalid("runner", reason))
            }
        }
    }
}

/// All weights of a decoder on a device.
pub struct DecoderWeights<B: LlmBackend> {
    pub(crate) embedding: Box<dyn Embedding<B>>,
    pub(crate) layers: Vec<LayerWeights<B>>,
    pub(crate) final_norm: B::Buffer<f32>,
    pub(crate) lm_head: Box<dyn Linear<B>>,
    /// What of the decoder they are.
    pub(crate) cut: RankCut,
}

/// Runs a decoder on one device with a KV cache of element `K`.
pub struct ModelRunner<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind = KvFp16> {
    spec: DecoderSpec,
    config: RunnerConfig,
    pool: PagedKvShape,
    pub(crate) ctx: B::Context,
    weights: DecoderWeights<B>,
    pub(crate) kv: KvCache<B, K>,
    scratch: Scratch<B>,
    adapters: Adapters<B>,
    rope: RopeTables<B>,
    batch: DeviceBatch<B>,
    /// Rows that want something: first those whose token is chosen here, then those whose logits are read, then
    /// those that want hidden states.
    wanted_rows: B::Buffer<i32>,
    logits: Act<B>,
    choices: Choices<B>,
    staging: Staging<B>,
    /// Steps that were submitted and not collected, oldest first.
    in_flight: VecDeque<SubmittedStep<B>>,
    /// What a step was read into, to be filled again.
    spare: Option<StepOutput>,
    /// Steps that were submitted.
    steps: u64,
}

/// Host memory that is filled anew at each step.
struct Staging<B: LlmBackend> {
    ints: Vec<i32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    activations: Vec<B::Act>,
}

impl<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind> ModelRunner<B, K> {
    /// Allocates everything that steps of the given sizes need.
    ///
    /// # Errors
    /// `InvalidArgument` for sizes out of range; `OutOfMemory`.
    pub fn new(
        device: &B,
        spec: DecoderSpec,
        weights: DecoderWeights<B>,
        config: RunnerConfig,
    ) -> Result<Self> {
        config.validate()?;
        spec.validate().map_err(Error::Model)?;
        let pool = config.pool_shape(&spec);
        let table_len = config.max_seqs * config.max_blocks_per_seq();
        let batch = DeviceBatch {
            shape: BatchShape::default(),
            tokens: device.alloc(config.max_tokens)?,
            rope_rows: device.alloc(config.max_tokens)?,
            token_seqs: device.alloc(config.max_tokens)?,
            query_starts: device.alloc(config.max_seqs + 1)?,
            kv_lens: device.alloc(config.max_seqs)?,
            block_tables: device.alloc(table_len)?,
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
            kv: KvCache::alloc(device, spec.layers.len(), pool)?,
            scratch: Scratch::alloc(device, &spec, config.max_tokens, config.profile)?,
            adapters: Adapters::new(),
            // A row wants one thing or the other.
            wanted_rows: device.alloc(config.max_tokens)?,
            logits: device.alloc(config.max_logit_rows * spec.vocab_size)?,
            choices: Choices::alloc(device, config.max_logit_rows)?,
            staging: Staging {
                ints: Vec::with_capacity(config.max_tokens.max(table_len).max(config.max_seqs + 1)),
                cos: vec![0.0; rope_staging],
                sin: vec![0.0; rope_staging],
                activations: Vec::with_capacity(spec.vocab_size),
            },
            ctx: device.new_context()?,
            in_flight: VecDeque::with_capacity(2),
            spare: None,
            steps: 0,
            spec,
            config,
            pool,
            weights,
            rope,
            batch,
        })
    }

    /// What is being run.
    pub fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    /// The sizes that were allocated for.
    pub fn config(&self) -> &RunnerConfig {
        &self.config
    }

    /// The KV pool of one layer.
    pub fn pool(&self) -> PagedKvShape {
        self.pool
    }

    /// The context that steps are recorded on.
    pub fn context_mut(&mut self) -> &mut B::Context {
        &mut self.ctx
    }

    /// How many steps may be submitted and not collected: 2 on a device that computes while the host goes on.
    pub fn in_flight(&self) -> usize {
        let device = B::device(&self.ctx);
        // What the host alone can choose, it would have to wait for anyway.
        match device.overlaps() && device.samples() && !self.config.profile {
            true => 2,
            false => 1,
        }
    }

    /// Submits one step: writes the batch's keys and values, and reads what is wanted of its rows: one entry of
    /// `wanted` for each of its `logit_rows`, and the hidden states of its `hidden_rows`.
    /// [`collect`](Self::collect) hands it over. A device that computes at once has it when this returns.
    ///
    /// # Errors
    /// `InvalidArgument` when the batch does not fit the runner's sizes or the pool, before anything
    /// is recorded; otherwise what the device says.
    pub fn submit(&mut self, batch: &StepBatch, wanted: &[Readback]) -> Result<Ticket> {
        self.check(batch, wanted)?;
        let rows = WantedRows::of(batch, wanted);
        self.choices.begin(batch, wanted);
        if !batch.tokens.is_empty() {
            self.upload(batch, wanted)?;
            self.take_choices()?;
            self.compute(batch, rows)?;
        }
        let step = self.read(rows, wanted)?;
        self.in_flight.push_back(step);
        self.steps += 1;
        Ok(Ticket::new(self.steps))
    }

    /// Waits for the oldest step in flight and hands over what was read of it. `out` is filled anew.
    ///
    /// # Errors
    /// `InvalidArgument` for the ticket of another step; what the device says.
    pub fn collect(&mut self, ticket: Ticket, out: &mut StepOutput) -> Result<()> {
        let oldest = self.steps + 1 - self.in_flight.len() as u64;
        let found = ticket.number();
        let Some(step) = self.in_flight.pop_front_if(|_| found == oldest) else {
            let reason = match self.in_flight.is_empty() {
                true => format!("found the ticket of step {found}, no step is in flight"),
                false => format!("found the ticket of step {found}, step {oldest} is the next one"),
            };
            return Err(Error::invalid("collect", reason));
        };
        let mut read = self.finish(step)?;
        std::mem::swap(&mut read, out);
        self.spare = Some(read);
        Ok(())
    }

    /// [`submit`](Self::submit), and [`collect`](Self::collect) at once.
    ///
    /// # Errors
    /// Those of `submit`.
    pub fn run(
        &mut self,
        batch: &StepBatch,
        wanted: &[Readback],
        out: &mut StepOutput,
    ) -> Result<()> {
        let ticket = self.submit(batch, wanted)?;
        self.collect(ticket, out)
    }

    /// Records a step over what was uploaded.
    fn compute(&mut self, batch: &StepBatch, rows: WantedRows) -> Result<()> {
        let (logit_rows, hidden_rows) = (rows.with_logits(), rows.hidden);
        let adapted = self.adapters.plan(batch);
        let Self {
            ctx,
            spec,
            weights,
            kv,
            scratch,
            adapters,
            rope,
            batch: state,
            logits,
            ..
        } = self;
        let rows_buffer = &self.wanted_rows;
        let mut body = |ctx: &mut B::Context| {
            let step = StepState {
                spec,
                batch: state,
                rope,
                adapters,
            };
            forward(ctx, weights, kv, &step, scratch)?;
            let wanted = logit_rows + hidden_rows;
            if wanted > 0 {
                gather(ctx, weights, &step, scratch, (rows_buffer, wanted))?;
            }
            if logit_rows > 0 {
                project(ctx, weights, scratch, logits, logit_rows)?;
            }
            Ok(())
        };
        let shape = state.shape;
        let decodes = shape.max_query_len == 1 && shape.seqs == shape.tokens;
        let steady = decodes && hidden_rows == 0;
        // What adapters add depends on which rows want them, which no key says. Collectives may go through the host,
        // where a replay would leave them out.
        let alone = B::world_size(ctx) == 1;
        if steady && alone && !adapted && !self.config.profile {
            let key = graph_key(shape, logit_rows);
            B::run_graph(ctx, key, &mut body)?;
        } else {
            body(ctx)?;
        }
        Ok(())
    }

    /// The spans of all ops since the last call, when the runner was made to measure them; else none.
    /// Times are nanoseconds since the runner was made.
    ///
    /// # Errors
    /// What the device says.
    pub fn take_spans(&mut self) -> Result<Vec<Span>> {
        self.scratch.profiler.take_spans(&mut self.ctx)
    }

    /// What loads LoRA adapters for this runner, on whatever thread.
    pub fn adapter_loader(&self) -> AdapterLoader<B> {
        AdapterLoader {
            device: B::device(&self.ctx).clone(),
            cut: self.weights.cut.clone(),
        }
    }

    /// Takes a LoRA adapter of this runner's [`adapter_loader`](Self::adapter_loader), for batches that name
    /// it. Memory for what adapters add is allocated with the first of them.
    ///
    /// # Errors
    /// What the device says.
    pub fn add_adapter(&mut self, id: AdapterId, adapter: LoadedAdapter<B>) -> Result<()> {
        let (device, most) = (B::device(&self.ctx), self.config.max_tokens);
        let lora = &mut self.scratch.lora;
        self.adapters
            .insert(device, &self.spec, most, (id, adapter), lora)
    }

    /// Loads a LoRA adapter and takes it.
    ///
    /// # Errors
    /// Those of [`AdapterLoader::load`] and [`add_adapter`](Self::add_adapter).
    pub fn load_adapter(&mut self, id: AdapterId, folder: &LoraFolder) -> Result<()> {
        let adapter = self.adapter_loader().load(folder)?;
        self.add_adapter(id, adapter)
    }

    /// Forgets an adapter; whether it was there.
    pub fn unload_adapter(&mut self, id: AdapterId) -> bool {
        self.adapters.unload(id)
    }

    /// Holds what is wanted against the batch, and the batch against this runner.
    pub(crate) fn check(&self, batch: &StepBatch, wanted: &[Readback]) -> Result<()> {
        let (found, rows) = (wanted.len(), batch.logit_rows.len());
        if found != rows {
            let reason = format!("{found} rows are wanted of a step with {rows} logit rows");
            return Err(Error::invalid("step", reason));
        }
        let sampled = wanted.iter().filter(|w| is_sampled(w)).count();
        if sampled != batch.sampling.len() {
            let found = batch.sampling.len();
            let reason = format!("{sampled} rows want a sampled token, {found} say how");
            return Err(Error::invalid("step", reason));
        }
        self.check_sizes(batch)
    }

    /// Holds the batch against the sizes of this runner and of its pool.
    fn check_sizes(&self, batch: &StepBatch) -> Result<()> {
        let fail = |reason: String| Err(Error::invalid("step", reason));
        let (most, found) = (self.in_flight(), self.in_flight.len());
        if found >= most {
            return fail(format!(
                "{found} steps are in flight, this runner takes {most}"
            ));
        }
        for choice in &batch.choices {
            let ChosenToken { token, row } = *choice;
            if found == 0 || self.choices.place(row).is_none() {
                return fail(format!(
                    "token {token} is to be chosen in row {row} of no step in flight"
                ));
            }
        }
        let limits = [
            ("tokens", batch.tokens.len(), self.config.max_tokens),
            ("sequences", batch.seqs(), self.config.max_seqs),
            (
                "logit rows",
                batch.logit_rows.len(),
                self.config.max_logit_rows,
            ),
        ];
        for (what, found, most) in limits {
            if found > most {
                return fail(format!(
                    "{found} {what} in a step, this runner takes {most}"
                ));
            }
        }
        let vocab = self.spec.vocab_size;
        if let Some(token) = batch.tokens.iter().find(|&&t| t as usize >= vocab) {
            return fail(format!(
                "token {token} is outside the vocabulary of {vocab}"
            ));
        }
        if let Some(AdapterId(id)) = self.adapters.missing(batch) {
            return fail(format!("adapter {id} is not loaded"));
        }
        for seq in 0..batch.seqs() {
            let kv_len = batch.kv_lens[seq] as usize;
            if kv_len > self.config.context {
                let capacity = self.config.context;
                return Err(Error::ContextOverflow {
                    requested: kv_len,
                    capacity,
                });
            }
            let table = batch.table(seq);
            let needed = kv_len.div_ceil(self.pool.block_size);
            if table.len() < needed {
                let found = table.len();
                return fail(format!(
                    "sequence {seq} has {found} KV blocks and needs {needed}"
                ));
            }
            if let Some(block) = table.iter().find(|b| b.0 as usize >= self.pool.blocks) {
                let blocks = self.pool.blocks;
                return fail(format!(
                    "KV block {} is outside the pool of {blocks}",
                    block.0
                ));
            }
        }
        Ok(())
    }

    /// Writes the batch's arrays to the device.
    fn upload(&mut self, batch: &StepBatch, wanted: &[Readback]) -> Result<()> {
        let seqs = batch.seqs();
        let rows = |seq: usize| batch.rows(seq).len();
        let tables = 0..seqs;
        let block_size = self.pool.block_size;
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
        write_ints::<B>(
            ctx,
            &mut state.tokens,
            ints,
            batch.tokens.iter().map(|&t| t as i32),
        )?;
        let seq_of_token = tables
            .clone()
            .flat_map(|s| std::iter::repeat_n(s as i32, rows(s)));
        write_ints::<B>(ctx, &mut state.token_seqs, ints, seq_of_token)?;
        let starts = batch.query_starts.iter().map(|&s| s as i32);
        write_ints::<B>(ctx, &mut state.query_starts, ints, starts)?;
        let lens = batch.kv_lens.iter().map(|&n| n as i32);
        write_ints::<B>(ctx, &mut state.kv_lens, ints, lens)?;
        let padded = tables.flat_map(|s| {
            let table = &batch.table(s)[..blocks_of(s)];
            let padding = std::iter::repeat_n(0, shape.table_stride - table.len());
            table.iter().map(|b| b.0 as i32).chain(padding)
        });
        write_ints::<B>(ctx, &mut state.block_tables, ints, padded)?;
        let rows = |kind: fn(&Readback) -> bool| {
            let rows = batch.logit_rows.iter().zip(wanted);
            rows.filter(move |(_, wanted)| kind(wanted)).map(|(r, _)| r)
        };
        let wanted = rows(is_token).chain(rows(is_logits));
        let wanted = wanted.chain(&batch.hidden_rows).map(|&row| row as i32);
        write_ints::<B>(ctx, &mut self.wanted_rows, ints, wanted)?;
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

fn write_ints<B: LlmBackend>(
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

/// Embeds the batch's tokens and runs all layers; the last layer's output is pending in `delta`.
fn forward<B: LlmBackend + BackendKvDtype<K>, K: KvDtypeKind>(
    ctx: &mut B::Context,
    weights: &DecoderWeights<B>,
    kv: &mut KvCache<B, K>,
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
) -> Result<()> {
    let shape = RowShape {
        rows: step.batch.shape.tokens,
        dim: step.spec.hidden_size,
    };
    let tokens = &step.batch.tokens;
    // [tokens] → [tokens, hidden]
    let Scratch {
        residual, profiler, ..
    } = scratch;
    profiler.measure(ctx, "embedding", |ctx| {
        weights.embedding.lookup(ctx, tokens, residual, shape)
    })?;
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

/// Final norm, and the rows that want logits or hidden states, in `delta`.
fn gather<B: LlmBackend>(
    ctx: &mut B::Context,
    weights: &DecoderWeights<B>,
    step: &StepState<'_, B>,
    scratch: &mut Scratch<B>,
    (rows, count): (&B::Buffer<i32>, usize),
) -> Result<()> {
    let (dim, eps) = (step.spec.hidden_size, step.spec.norm_eps);
    let norm = NormShape {
        rows: step.batch.shape.tokens,
        dim,
        eps,
    };
    let Scratch {
        residual,
        delta,
        normed,
        profiler,
        ..
    } = scratch;
    // [tokens, hidden] → [wanted, hidden]
    profiler.measure(ctx, "final_norm", |ctx| {
        B::fused_add_rms_norm(ctx, residual, delta, &weights.final_norm, normed, norm)?;
        B::gather_rows(ctx, normed, rows, delta, RowShape { rows: count, dim })
    })
}

/// Output projection of the first `count` rows that were gathered.
fn project<B: LlmBackend>(
    ctx: &mut B::Context,
    weights: &DecoderWeights<B>,
    scratch: &mut Scratch<B>,
    logits: &mut Act<B>,
    count: usize,
) -> Result<()> {
    let Scratch {
        delta, profiler, ..
    } = scratch;
    // [wanted, hidden] → [wanted, vocab]
    profiler.measure(ctx, "lm_head", |ctx| {
        weights.lm_head.forward(ctx, delta, logits, count)
    })
}
