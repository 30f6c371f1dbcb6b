//! Which element activations have, and which kernel an op runs for the elements of its buffers.
//!
//! Kernel sources are one text for all elements: `Act` of `kernels/common.cuh` is what the module was compiled for. An op
//! whose buffers may have another role (the residual stream, logits, which are f32 always) has a kernel for each, whose name
//! ends in `_act` or `_f32`.

use super::BACKEND;
use ferrum_types::{Dtype, Error, FloatElement, Result, SrcDtype};
use half::{bf16, f16};

/// An element that activations can have.
pub trait CudaAct: FloatElement + sealed::Sealed {
    /// What the kernels are compiled with.
    const DEFINES: &'static [&'static str];
    /// The same element as that of weights, which products take as they are.
    const WEIGHT: SrcDtype;
}

impl CudaAct for f32 {
    const DEFINES: &'static [&'static str] = &[];
    const WEIGHT: SrcDtype = SrcDtype::F32;
}

impl CudaAct for bf16 {
    const DEFINES: &'static [&'static str] = &["-DACT_BF16"];
    const WEIGHT: SrcDtype = SrcDtype::BF16;
}

impl CudaAct for f16 {
    const DEFINES: &'static [&'static str] = &["-DACT_F16"];
    const WEIGHT: SrcDtype = SrcDtype::F16;
}

mod sealed {
    /// Kernels are written for these elements.
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
}

/// The kernel for a buffer of `T`, of those for activations and for f32.
pub(super) fn of_role<A: CudaAct, T: FloatElement>(
    op: &'static str,
    [act, f32]: [&'static str; 2],
) -> Result<&'static str> {
    role::<A, T, _>(op, [act, f32])
}

/// The same for two buffers: the first one chooses the row.
pub(super) fn of_roles<A: CudaAct, T: FloatElement, U: FloatElement>(
    op: &'static str,
    kernels: [[&'static str; 2]; 2],
) -> Result<&'static str> {
    of_role::<A, U>(op, role::<A, T, _>(op, kernels)?)
}

fn role<A: CudaAct, T: FloatElement, V>(op: &'static str, [act, f32]: [V; 2]) -> Result<V> {
    if T::DTYPE == A::DTYPE {
        Ok(act)
    } else if T::DTYPE == Dtype::F32 {
        Ok(f32)
    } else {
        let (found, act) = (T::DTYPE.name(), A::DTYPE.name());
        Err(Error::Unsupported {
            op,
            backend: BACKEND,
            reason: format!("a buffer holds {found}, and kernels are for {act} and f32"),
            hint: String::new(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_has_the_kernel_of_its_role() {
        let names = ["act", "f32"];
        assert_eq!(of_role::<bf16, bf16>("op", names), Ok("act"));
        assert_eq!(of_role::<bf16, f32>("op", names), Ok("f32"));
        assert_eq!(of_role::<f32, f32>("op", names), Ok("act"));
        assert!(matches!(
            of_role::<bf16, f16>("op", names),
            Err(Error::Unsupported { op: "op", .. })
        ));
        let names = [["aa", "af"], ["fa", "ff"]];
        assert_eq!(of_roles::<bf16, f32, bf16>("op", names), Ok("fa"));
        assert_eq!(of_roles::<bf16, bf16, f32>("op", names), Ok("af"));
    }
}
