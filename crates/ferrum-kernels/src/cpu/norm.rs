//! Normalisation of rows.

use super::{CpuBackend, CpuContext};
use crate::backend::{
    BackendCollective, GroupCall, NormShape, ParallelNorm, check, host_collectives,
};
use ferrum_simd::exec::Exec;
use ferrum_simd::memory::CpuBuffer;
use ferrum_simd::norm;
use ferrum_types::{Dtype, Result};

type Buf = CpuBuffer<f32>;

/// `out = x / √(mean(x²) + eps) · weight`.
pub(crate) fn rms_norm(
    exec: &Exec,
    x: &Buf,
    weight: &Buf,
    out: &mut Buf,
    shape: NormShape,
) -> Result<()> {
    check::rms_norm(x, weight, out, shape)?;
    let (x, weight) = (x.as_slice(), weight.as_slice());
    norm::rms_norm(exec, x, weight, out.as_mut_slice(), shape);
    Ok(())
}

/// `residual += x; out = rms_norm(residual)`.
pub(crate) fn fused_add_rms_norm(
    exec: &Exec,
    residual: &mut Buf,
    x: &Buf,
    weight: &Buf,
    out: &mut Buf,
    shape: NormShape,
) -> Result<()> {
    check::fused_add_rms_norm(residual, x, weight, out, shape)?;
    let (residual, out) = (residual.as_mut_slice(), out.as_mut_slice());
    norm::fused_add_rms_norm(exec, residual, x.as_slice(), weight.as_slice(), out, shape);
    Ok(())
}

/// `out = (x - mean) / √(var + eps) · weight + bias`.
pub(crate) fn layer_norm(
    exec: &Exec,
    x: &Buf,
    weight: &Buf,
    bias: Option<&Buf>,
    out: &mut Buf,
    shape: NormShape,
) -> Result<()> {
    check::layer_norm(x, weight, bias, out, shape)?;
    let (x, weight) = (x.as_slice(), weight.as_slice());
    let bias = bias.map(CpuBuffer::as_slice);
    norm::layer_norm(exec, x, weight, bias, out.as_mut_slice(), shape);
    Ok(())
}

/// [`BackendCollective::rms_norm_parallel`]: its sums of squares are the same whether ranks make them or a context that is alone.
pub(super) fn rms_norm_parallel(
    ctx: &mut CpuContext,
    x: &Buf,
    weight: &Buf,
    out: &mut Buf,
    shape: ParallelNorm,
) -> Result<()> {
    const OP: &str = "rms_norm_parallel";
    let ParallelNorm {
        part,
        dim,
        counts,
        sums,
    } = shape;
    check::rms_norm(x, weight, out, part)?;
    host_collectives::check_columns::<CpuBackend>(ctx, shape)?;
    let group = CpuBackend::group(ctx).cloned();
    let (x, weight, out) = (x.as_slice(), weight.as_slice(), out.as_mut_slice());
    let (exec, scratch) = ctx.parts();
    // Memory of no elements would be aligned to nothing.
    let squares: &mut [f64] = bytemuck::cast_slice_mut(scratch.floats(2 * part.rows.max(1))?);
    let squares = &mut squares[..part.rows];
    match counts {
        true => norm::squares(exec, x, part.dim, sums, squares),
        false => squares.fill(0.0),
    }
    if let Some(group) = group {
        let bytes = part.rows * size_of::<f64>();
        let call = GroupCall {
            op: OP,
            // A sum takes two words.
            dtype: Dtype::U32,
            len: 2 * part.rows,
            detail: dim,
        };
        group.post(call, bytes, &mut |bytes| {
            bytes.copy_from_slice(bytemuck::cast_slice(squares));
            Ok(())
        })?;
        group.gather(&mut |ranks| {
            host_collectives::tree(ranks, squares, &|x: f64| x, &|a, b| a + b, 0);
            Ok(())
        })?;
    }
    norm::rms_norm_of_squares(exec, x, weight, out, (squares, dim), part);
    Ok(())
}
