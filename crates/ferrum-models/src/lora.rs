//! LoRA adapters beside the weights of a runner, chosen for each sequence.
//!
//! A fused projection has one pair of matrices too: `down` is stacked, and `up` has the parts' matrices
//! on its diagonal. So adapters know nothing of how a layer splits its rows, and work on any backend and
//! any form of weights.
//!
//! A step cuts its rows into runs of one adapter each. What a run adds is computed by the same products
//! as everything else, row by row, so a sequence's bits do not depend on the adapters of others.

use crate::batch::StepBatch;
use crate::families::HF_NAMES;
use crate::layer::scratch_widths;
use crate::load::to_f32;
use crate::rope::paired_row;
use crate::spec::{AttentionSpec, DecoderSpec, FeedForwardSpec, LayerSpec};
use ferrum_formats::{LoraFolder, LoraPair};
use ferrum_kernels::{Act, Backend, GemmShape, RopeStyle, WeightPart};
use ferrum_types::{AdapterId, Error, Result, SrcDtype};
use std::collections::BTreeMap;
use std::ops::Range;

/// The projections of a layer to which an adapter can add.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Projection {
    Qkv,
    AttnOut,
    GateUp,
    Down,
}

impl Projection {
    const ALL: [Projection; 4] = [Self::Qkv, Self::AttnOut, Self::GateUp, Self::Down];

    /// The maps that it joins, by their names in Hugging Face checkpoints.
    fn parts(self) -> &'static [&'static str] {
        const QKV: [&str; 3] = [HF_NAMES.q, HF_NAMES.k, HF_NAMES.v];
        const ATTN_OUT: [&str; 1] = [HF_NAMES.attn_out];
        const GATE_UP: [&str; 2] = [HF_NAMES.gate, HF_NAMES.up];
        const DOWN: [&str; 1] = [HF_NAMES.down];
        match self {
            Self::Qkv => &QKV,
            Self::AttnOut => &ATTN_OUT,
            Self::GateUp => &GATE_UP,
            Self::Down => &DOWN,
        }
    }
}

/// A map as the adapter must fit it.
#[derive(Clone, Copy, Debug)]
struct PartShape {
    rows: usize,
    cols: usize,
    /// Heads whose rows lie in pairs here and in halves in the adapter; 0: rows keep their order.
    heads: usize,
}

/// The shapes of a projection's parts; `None` where the layer has experts instead.
fn part_shapes(spec: &DecoderSpec, layer: &LayerSpec, at: Projection) -> Option<Vec<PartShape>> {
    let AttentionSpec::Gqa(gqa) = &layer.attention;
    let (hidden, q_dim, kv_dim) = (
        spec.hidden_size,
        gqa.heads * gqa.head_dim,
        gqa.kv_heads * gqa.head_dim,
    );
    let paired = |heads| match spec.rope.style {
        RopeStyle::Interleaved => heads,
        RopeStyle::HalfSplit => 0,
    };
    let shape = |rows, cols, heads| PartShape { rows, cols, heads };
    let inner = match &layer.feed_forward {
        FeedForwardSpec::GatedMlp(mlp) => Some(mlp.intermediate),
        FeedForwardSpec::Moe(_) => None,
    };
    match at {
        Projection::Qkv => Some(vec![
            shape(q_dim, hidden, paired(gqa.heads)),
            shape(kv_dim, hidden, paired(gqa.kv_heads)),
            shape(kv_dim, hidden, 0),
        ]),
        Projection::AttnOut => Some(vec![shape(hidden, q_dim, 0)]),
        Projection::GateUp => inner.map(|inner| vec![shape(inner, hidden, 0); 2]),
        Projection::Down => inner.map(|inner| vec![shape(hidden, inner, 0)]),
    }
}

/// What an adapter adds to one projection.
struct Delta<B: Backend> {
    /// `[rank, cols]`.
    down: B::Weight,
    /// `[rows, rank]`, scaled.
    up: B::Weight,
    rows: usize,
    rank: usize,
    cols: usize,
}

/// An adapter on a device: for each layer what it adds to each [`Projection`].
struct Adapter<B: Backend> {
    layers: Vec<[Option<Delta<B>>; 4]>,
}

/// An adapter that is on the device and has no runner yet.
pub struct LoadedAdapter<B: Backend>(Adapter<B>);

/// Loads adapters for a runner on any thread, while the runner makes steps.
#[derive(Clone)]
pub struct AdapterLoader<B: Backend> {
    pub(crate) device: B,
    pub(crate) spec: DecoderSpec,
}

impl<B: Backend> AdapterLoader<B> {
    /// Reads an adapter, holds it against the model, and writes it to the device.
    ///
    /// # Errors
    /// [`Error::Model`] names the module that does not fit the model; what the device says.
    pub fn load(&self, folder: &LoraFolder) -> Result<LoadedAdapter<B>> {
        let adapter = Adapter::load(&self.device, &self.spec, folder)?;
        folder.tensors().release();
        Ok(LoadedAdapter(adapter))
    }
}

/// The pairs of one projection, in the order of its parts.
type Parts<'a> = [Option<LoraPair<'a>>; 3];

impl<B: Backend> Adapter<B> {
    fn load(device: &B, spec: &DecoderSpec, folder: &LoraFolder) -> Result<Self> {
        let mut found: Vec<[Parts<'_>; 4]> = vec![Default::default(); spec.layers.len()];
        for pair in folder.pairs() {
            let (layer, at, part) = place(spec, folder, &pair)?;
            found[layer][at as usize][part] = Some(pair);
        }
        let mut layers = Vec::with_capacity(found.len());
        for (layer, parts) in spec.layers.iter().zip(&found) {
            let mut deltas = [None, None, None, None];
            for at in Projection::ALL {
                let pairs = &parts[at as usize];
                if let Some(shapes) = part_shapes(spec, layer, at)
                    && pairs.iter().any(Option::is_some)
                {
                    deltas[at as usize] = Some(fuse(device, folder, pairs, &shapes)?);
                }
            }
            layers.push(deltas);
        }
        Ok(Self { layers })
    }

    /// The largest rank of a projection.
    fn rank(&self) -> usize {
        let deltas = self.layers.iter().flatten().flatten();
        deltas.map(|delta| delta.rank).max().unwrap_or(0)
    }
}

/// To which part of which projection of which layer a pair belongs; its shape fits there.
fn place(
    spec: &DecoderSpec,
    folder: &LoraFolder,
    pair: &LoraPair<'_>,
) -> Result<(usize, Projection, usize)> {
    let fail = |reason: String| {
        let (path, module) = (folder.path().display(), pair.module.escape_debug());
        Err(Error::Model(format!(
            "{path}: module \"{module}\" {reason}"
        )))
    };
    let Some((index, part)) = HF_NAMES.layer_part(pair.module) else {
        return fail("cannot be adapted, expected the linear maps of layers only".into());
    };
    let Some(layer) = spec.layers.get(index) else {
        let layers = spec.layers.len();
        return fail(format!(
            "is of layer {index}, and the model has {layers} layers"
        ));
    };
    for at in Projection::ALL {
        let Some(number) = at.parts().iter().position(|&name| name == part) else {
            continue;
        };
        let Some(shape) =
            part_shapes(spec, layer, at).and_then(|shapes| shapes.get(number).copied())
        else {
            return fail("does not exist in a layer with experts".into());
        };
        let found = (pair.up.shape.first(), pair.down.shape.get(1));
        if found != (Some(&shape.rows), Some(&shape.cols)) {
            return fail(format!(
                "has {} outputs of {} inputs in this adapter, and {} of {} in the model\nhint: the \
                 adapter is for another model{}",
                found.0.copied().unwrap_or(0),
                found.1.copied().unwrap_or(0),
                shape.rows,
                shape.cols,
                folder
                    .base_model()
                    .map_or(String::new(), |base| format!(" ({})", base.escape_debug())),
            ));
        }
        return Ok((index, at, number));
    }
    let known: Vec<_> = Projection::ALL
        .iter()
        .flat_map(|at| at.parts())
        .copied()
        .collect();
    fail(format!(
        "cannot be adapted, expected one of {}",
        known.join(", ")
    ))
}

/// One pair of matrices for a projection.
fn fuse<B: Backend>(
    device: &B,
    folder: &LoraFolder,
    pairs: &Parts<'_>,
    shapes: &[PartShape],
) -> Result<Delta<B>> {
    let rows = shapes.iter().map(|shape| shape.rows).sum::<usize>();
    let cols = shapes.first().map_or(0, |shape| shape.cols);
    let ranks = pairs.iter().flatten().map(|pair| pair.down.shape[0]);
    let rank = ranks.sum::<usize>();
    let mut down = Vec::with_capacity(rank * cols);
    let mut up = vec![0f32; rows * rank];
    let (mut first_row, mut first_rank) = (0, 0);
    for (pair, shape) in pairs.iter().zip(shapes) {
        if let Some(pair) = pair {
            let own = pair.down.shape[0];
            down.extend(to_f32(folder.tensors(), &pair.down)?);
            let values = to_f32(folder.tensors(), &pair.up)?;
            for row in 0..shape.rows {
                let from = &values[paired_row(row, shape.rows, shape.heads) * own..][..own];
                let to = &mut up[(first_row + row) * rank + first_rank..][..own];
                for (to, from) in to.iter_mut().zip(from) {
                    *to = pair.scale * from;
                }
            }
            first_rank += own;
        }
        first_row += shape.rows;
    }
    let load = |values: &[f32], rows, cols| {
        let part = WeightPart {
            bytes: bytemuck::cast_slice(values),
            dtype: SrcDtype::F32,
            rows,
        };
        device.from_weight_parts(&[part], cols)
    };
    Ok(Delta {
        down: load(&down, rank, cols)?,
        up: load(&up, rows, rank)?,
        rows,
        rank,
        cols,
    })
}

/// Consecutive rows of a step that want the same adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Run {
    adapter: AdapterId,
    rows: Range<usize>,
}

/// Activations of runs. Rows are tokens.
pub(crate) struct LoraScratch<B: Backend> {
    /// `[tokens, inputs]`: a run's rows of the input, where they do not come first.
    input: Act<B>,
    /// `[tokens, rank]`.
    low: Act<B>,
    /// `[tokens, outputs]`: what the adapter adds.
    delta: Act<B>,
    /// `[tokens, outputs]`: a run's rows of the output, where they do not come first.
    output: Act<B>,
    rank: usize,
}

/// The adapters of a runner, and which rows of the current step want which.
pub(crate) struct Adapters<B: Backend> {
    loaded: BTreeMap<AdapterId, Adapter<B>>,
    runs: Vec<Run>,
}

impl<B: Backend> Adapters<B> {
    pub(crate) fn new() -> Self {
        Self {
            loaded: BTreeMap::new(),
            runs: Vec::new(),
        }
    }

    /// Takes an adapter, and sees to it that `scratch` is large enough for steps with it.
    pub(crate) fn insert(
        &mut self,
        device: &B,
        spec: &DecoderSpec,
        max_tokens: usize,
        (id, LoadedAdapter(adapter)): (AdapterId, LoadedAdapter<B>),
        scratch: &mut Option<LoraScratch<B>>,
    ) -> Result<()> {
        let rank = adapter.rank();
        if scratch.as_ref().is_none_or(|scratch| scratch.rank < rank) {
            let widest = scratch_widths(spec).into_iter().max().unwrap_or(0);
            let alloc = |width| device.alloc::<B::Act>(max_tokens * width);
            *scratch = Some(LoraScratch {
                input: alloc(widest)?,
                low: alloc(rank)?,
                delta: alloc(widest)?,
                output: alloc(widest)?,
                rank,
            });
        }
        self.loaded.insert(id, adapter);
        Ok(())
    }

    /// Whether there was one of that name.
    pub(crate) fn unload(&mut self, id: AdapterId) -> bool {
        self.loaded.remove(&id).is_some()
    }

    /// The first adapter of a batch that is not there.
    pub(crate) fn missing(&self, batch: &StepBatch) -> Option<AdapterId> {
        let mut wanted = batch.adapters.iter().flatten();
        wanted.find(|id| !self.loaded.contains_key(id)).copied()
    }

    /// Cuts a batch into runs; whether there are any.
    pub(crate) fn plan(&mut self, batch: &StepBatch) -> bool {
        self.runs.clear();
        for (seq, adapter) in batch.adapters.iter().enumerate() {
            let (Some(adapter), rows) = (*adapter, batch.rows(seq)) else {
                continue;
            };
            match self.runs.last_mut() {
                Some(run) if run.adapter == adapter && run.rows.end == rows.start => {
                    run.rows.end = rows.end;
                }
                _ if rows.is_empty() => {}
                _ => self.runs.push(Run { adapter, rows }),
            }
        }
        !self.runs.is_empty()
    }

    /// Adds what the step's adapters add to projection `at` of layer `layer`, whose input is `x`:
    /// `out[rows, :] += up · (down · x[rows, :])`.
    pub(crate) fn add(
        &self,
        ctx: &mut B::Context,
        (layer, at): (usize, Projection),
        x: &Act<B>,
        out: &mut Act<B>,
        scratch: &mut Option<LoraScratch<B>>,
    ) -> Result<()> {
        for run in &self.runs {
            let delta = self
                .loaded
                .get(&run.adapter)
                .and_then(|a| a.layers.get(layer));
            let delta = delta.and_then(|deltas| deltas[at as usize].as_ref());
            let (Some(delta), Some(scratch)) = (delta, scratch.as_mut()) else {
                continue;
            };
            delta.add(ctx, &run.rows, x, out, scratch)?;
        }
        Ok(())
    }
}

impl<B: Backend> Delta<B> {
    fn add(
        &self,
        ctx: &mut B::Context,
        run: &Range<usize>,
        x: &Act<B>,
        out: &mut Act<B>,
        scratch: &mut LoraScratch<B>,
    ) -> Result<()> {
        let (first, rows) = (run.start, run.len());
        let LoraScratch {
            input,
            low,
            delta,
            output,
            ..
        } = scratch;
        // Ops begin at the first row of a buffer.
        let x = match first {
            0 => x,
            _ => {
                let cols = self.cols;
                B::copy_slice(ctx, x, first * cols, input, 0, rows * cols)?;
                &*input
            }
        };
        let shape = |n, k| GemmShape { rows, n, k };
        // [rows, cols] → [rows, rank] → [rows, outputs]
        B::gemm(ctx, x, &self.down, low, shape(self.rank, self.cols))?;
        B::gemm(ctx, low, &self.up, delta, shape(self.rows, self.rank))?;
        let len = rows * self.rows;
        if first == 0 {
            return B::add_inplace(ctx, out, delta, len);
        }
        B::copy_slice(ctx, out, first * self.rows, output, 0, len)?;
        B::add_inplace(ctx, output, delta, len)?;
        B::copy_slice(ctx, output, 0, out, first * self.rows, len)
    }
}
