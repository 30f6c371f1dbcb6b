//! Checked sizes and conditions.

use crate::{Error, Result};

/// The product of `dims`: how many elements a shape has.
///
/// # Errors
/// `InvalidArgument` when it does not fit. A zero makes a shape empty, but the sizes beside it have to
/// fit too, because strides are products of some of them.
#[inline]
pub fn elements(op: &'static str, dims: &[usize]) -> Result<usize> {
    let product = dims
        .iter()
        .try_fold(1usize, |product, dim| product.checked_mul((*dim).max(1)));
    match product {
        Some(_) if dims.contains(&0) => Ok(0),
        Some(product) => Ok(product),
        None => {
            let reason = format!("{dims:?} elements overflow the address space");
            Err(Error::invalid(op, reason))
        }
    }
}

/// `Ok` when `holds`, else [`Error::InvalidArgument`] with the reason.
#[inline]
pub fn require(op: &'static str, holds: bool, reason: impl FnOnce() -> String) -> Result<()> {
    if holds {
        Ok(())
    } else {
        Err(Error::invalid(op, reason()))
    }
}
