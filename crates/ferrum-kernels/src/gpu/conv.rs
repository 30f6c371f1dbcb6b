//! Convolutions: one lane makes one output and sums channels, then taps, in order. And what layers with states compute
//! beside them.

use super::GpuBackend;
use super::buffer::GpuBuffer;
use super::context::{Bind, GpuContext, LANES, P};
use super::pipeline::Kernel;
use crate::backend::{
    BackendState, CausalConvShape, Conv1dShape, DeviceBatch, HeadOrder, LinearAttention,
    LinearAttentionRule, LinearAttentionShape, PatchShape, StateShape, check,
};
use ferrum_types::Result;

pub(super) static CONV1D: Kernel = Kernel {
    name: "conv1d",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/conv1d.wgsl"),
    ],
    access: "rrrw",
    constants: &[],
};
pub(super) static CONV2D_PATCH: Kernel = Kernel {
    name: "conv2d_patch",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/conv2d_patch.wgsl"),
    ],
    access: "rrrw",
    constants: &[],
};

pub(super) static CAUSAL_CONV1D: Kernel = Kernel {
    name: "causal_conv1d",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/ragged.wgsl"),
        include_str!("shaders/causal_conv1d.wgsl"),
    ],
    access: "rrrrrrw",
    constants: &[],
};
pub(super) static CAUSAL_CONV1D_STATE: Kernel = Kernel {
    name: "causal_conv1d_state",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/causal_conv1d_state.wgsl"),
    ],
    access: "rrrw",
    constants: &[],
};

pub(super) static LINEAR_ATTENTION: Kernel = Kernel {
    name: "linear_attention",
    wgsl: &[
        include_str!("shaders/grid.wgsl"),
        include_str!("shaders/linear_attention.wgsl"),
    ],
    access: "rrrrrww",
    constants: &[],
};

/// `[c_in, len]` → `[c_out, out_len]`.
pub(super) fn conv1d(
    ctx: &mut GpuContext,
    x: &GpuBuffer<f32>,
    weight: &GpuBuffer<f32>,
    bias: Option<&GpuBuffer<f32>>,
    out: &mut GpuBuffer<f32>,
    shape: Conv1dShape,
) -> Result<()> {
    const OP: &str = "conv1d";
    let s = shape;
    let lens = check::conv1d(x, weight, bias, out, shape)?;
    // The shader's positions are 32 bits wide.
    check::require(OP, s.len.max(s.padding) < (u32::MAX / 4) as usize, || {
        format!("length {} with padding {} overflows", s.len, s.padding)
    })?;
    ctx.run(
        OP,
        (&CONV1D, &[]),
        [x.into(), weight.into(), bias.into(), out.into()],
        &[
            P::U(lens.out),
            P::U(s.out_len()),
            P::U(s.len),
            P::U(s.c_in / s.groups),
            P::U(s.c_out / s.groups),
            P::U(s.kernel),
            P::U(s.stride),
            P::U(s.padding),
            P::U(usize::from(bias.is_some())),
        ],
        lens.out.div_ceil(LANES),
    )
}

/// `[channels, height, width]` → `[patches, out]`.
pub(super) fn conv2d_patch(
    ctx: &mut GpuContext,
    image: &GpuBuffer<f32>,
    weight: &GpuBuffer<f32>,
    bias: Option<&GpuBuffer<f32>>,
    rows: &mut GpuBuffer<f32>,
    shape: PatchShape,
) -> Result<()> {
    const OP: &str = "conv2d_patch";
    let s = shape;
    let lens = check::conv2d_patch(image, weight, bias, rows, shape)?;
    ctx.run(
        OP,
        (&CONV2D_PATCH, &[]),
        [image.into(), weight.into(), bias.into(), rows.into()],
        &[
            P::U(lens.out),
            P::U(s.out),
            P::U(s.channels),
            P::U(s.height),
            P::U(s.width),
            P::U(s.patch),
            P::U(usize::from(bias.is_some())),
        ],
        lens.out.div_ceil(LANES),
    )
}

/// States are copied as provided, by copies on the device.
impl BackendState for GpuBackend {
    fn records_states(&self) -> bool {
        true
    }

    fn causal_conv1d(
        ctx: &mut GpuContext,
        x: &GpuBuffer<f32>,
        (weight, bias): (&GpuBuffer<f32>, Option<&GpuBuffer<f32>>),
        states: &mut GpuBuffer<f32>,
        batch: &DeviceBatch<Self>,
        out: &mut GpuBuffer<f32>,
        shape: CausalConvShape,
    ) -> Result<()> {
        const OP: &str = "causal_conv1d";
        let weights = (weight, bias);
        let lens = check::causal_conv1d::<Self>(x, weights, states, batch, out, shape)?;
        let CausalConvShape {
            channels,
            kernel,
            states: StateShape { slots, elements },
            offset,
        } = shape;
        let seqs = batch.shape.seqs;
        let binds = [
            x.into(),
            weight.into(),
            bias.into(),
            Bind::from(&*states),
            Bind::from(&batch.query_starts),
            Bind::from(&batch.state_slots),
            out.into(),
        ];
        let state = [P::U(slots), P::U(elements), P::U(offset)];
        let sizes = [P::U(lens.x), P::U(channels), P::U(kernel), P::U(seqs)];
        let has_bias = P::U(usize::from(bias.is_some()));
        let params: Vec<_> = sizes.into_iter().chain(state).chain([has_bias]).collect();
        let groups = lens.x.div_ceil(LANES);
        ctx.run(OP, (&CAUSAL_CONV1D, &[]), binds, &params, groups)?;
        if shape.state_len() == 0 {
            return Ok(());
        }
        let binds = [
            x.into(),
            Bind::from(&batch.query_starts),
            Bind::from(&batch.state_slots),
            states.into(),
        ];
        // A lane for each channel of each sequence.
        let lanes = seqs * channels;
        let (kept, tokens) = (P::U(kernel - 1), P::U(batch.shape.tokens));
        let sizes = [P::U(lanes), P::U(channels), kept, tokens];
        let params: Vec<_> = sizes.into_iter().chain(state).collect();
        let groups = lanes.div_ceil(LANES);
        ctx.run(OP, (&CAUSAL_CONV1D_STATE, &[]), binds, &params, groups)
    }

    fn linear_attention(
        ctx: &mut GpuContext,
        inputs: LinearAttention<'_, Self>,
        states: &mut GpuBuffer<f32>,
        batch: &DeviceBatch<Self>,
        out: &mut GpuBuffer<f32>,
        shape: LinearAttentionShape,
    ) -> Result<()> {
        const OP: &str = "linear_attention";
        check::linear_attention::<Self>(&inputs, states, batch, out, shape)?;
        let binds = [
            inputs.x.into(),
            inputs.gates.into(),
            inputs.params.into(),
            Bind::from(&batch.query_starts),
            Bind::from(&batch.state_slots),
            states.into(),
            out.into(),
        ];
        // A lane for each column of each head's state of each sequence.
        let lanes = batch.shape.seqs * shape.value_width();
        let StateShape { slots, elements } = shape.states;
        let is_delta = shape.rule == LinearAttentionRule::GatedDelta;
        let params = [
            lanes,
            shape.key_heads,
            shape.value_heads,
            shape.key_dim,
            shape.value_dim,
            batch.shape.tokens,
            slots,
            elements,
            shape.offset,
            usize::from(is_delta),
            usize::from(shape.order == HeadOrder::Interleaved),
        ];
        let groups = lanes.div_ceil(LANES);
        ctx.run(
            OP,
            (&LINEAR_ATTENTION, &[]),
            binds,
            &params.map(P::U),
            groups,
        )
    }
}
