//! Ops on single elements: activations, sums, products.

use crate::backend::{Activation, GeluKind, RowShape, check};
use ferrum_simd::elementwise;
use ferrum_simd::exec::Exec;
use ferrum_simd::memory::CpuBuffer;
use ferrum_types::Result;

type Buf = CpuBuffer<f32>;

/// `out = f(x)`, or `out = f(x) · y`.
pub(crate) fn activate(
    exec: &Exec,
    activation: Activation,
    (x, y): (&Buf, Option<&Buf>),
    out: &mut Buf,
    len: usize,
) -> Result<()> {
    check::activate("activate", x, y, out, len)?;
    let input = (x.as_slice(), y.map(CpuBuffer::as_slice));
    elementwise::activate(exec, activation, input, out.as_mut_slice(), len);
    Ok(())
}

/// `x += y`.
pub(crate) fn add_inplace(exec: &Exec, x: &mut Buf, y: &Buf, len: usize) -> Result<()> {
    check::zip_inplace("add_inplace", x, y, len)?;
    elementwise::add_inplace(exec, &mut x.as_mut_slice()[..len], y.as_slice());
    Ok(())
}

/// `x += scale · y`.
pub(crate) fn scaled_add_inplace(
    exec: &Exec,
    x: &mut Buf,
    y: &Buf,
    scale: f32,
    len: usize,
) -> Result<()> {
    check::zip_inplace("scaled_add_inplace", x, y, len)?;
    elementwise::scaled_add_inplace(exec, &mut x.as_mut_slice()[..len], y.as_slice(), scale);
    Ok(())
}

/// `x = x · scale`.
pub(crate) fn scale_inplace(exec: &Exec, x: &mut Buf, scale: f32, len: usize) -> Result<()> {
    check::inplace("scale_inplace", x, len)?;
    elementwise::scale_inplace(exec, &mut x.as_mut_slice()[..len], scale);
    Ok(())
}

/// `x = cap · tanh(x / cap)`.
pub(crate) fn softcap(exec: &Exec, x: &mut Buf, cap: f32, len: usize) -> Result<()> {
    check::softcap(x, cap, len)?;
    elementwise::softcap(exec, &mut x.as_mut_slice()[..len], cap);
    Ok(())
}

/// Rows `[gate | up]` → `out[rows, dim] = silu(gate) · up`.
pub(crate) fn silu_gated(exec: &Exec, gate_up: &Buf, out: &mut Buf, shape: RowShape) -> Result<()> {
    check::gated("fused_silu_mul_split", gate_up, out, shape)?;
    elementwise::silu_gated(exec, gate_up.as_slice(), out.as_mut_slice(), shape);
    Ok(())
}

/// Rows `[gate | up]` → `out[rows, dim] = gelu(gate) · up`.
pub(crate) fn gelu_gated(
    exec: &Exec,
    gate_up: &Buf,
    out: &mut Buf,
    kind: GeluKind,
    shape: RowShape,
) -> Result<()> {
    check::gated("fused_gelu_mul_split", gate_up, out, shape)?;
    let (gate_up, out) = (gate_up.as_slice(), out.as_mut_slice());
    elementwise::gelu_gated(exec, gate_up, out, kind, shape);
    Ok(())
}

/// `x[r, :] += bias`.
pub(crate) fn add_bias(exec: &Exec, x: &mut Buf, bias: &Buf, shape: RowShape) -> Result<()> {
    check::add_bias(x, bias, shape)?;
    elementwise::add_bias(exec, x.as_mut_slice(), bias.as_slice(), shape);
    Ok(())
}
