//! Checks that every op makes before it records anything.

use ferrum_types::{Error, Result};

/// The product of sizes.
///
/// # Errors
/// `InvalidArgument` when it does not fit.
pub(super) fn product(op: &'static str, sizes: &[usize]) -> Result<usize> {
    // A zero makes the shape empty, however large the other sizes are.
    if sizes.contains(&0) {
        return Ok(0);
    }
    let product = sizes.iter().try_fold(1usize, |n, s| n.checked_mul(*s));
    product.ok_or_else(|| Error::invalid(op, format!("the sizes {sizes:?} multiply to too much")))
}

/// `Ok` when `holds`, else `InvalidArgument` with the reason.
pub(super) fn require(
    op: &'static str,
    holds: bool,
    reason: impl FnOnce() -> String,
) -> Result<()> {
    match holds {
        true => Ok(()),
        false => Err(Error::invalid(op, reason())),
    }
}

/// Checks a soft-cap.
pub(super) fn check_cap(op: &'static str, cap: f32) -> Result<()> {
    require(op, cap > 0.0 && cap.is_finite(), || {
        format!("softcap is {cap}, expected a positive number")
    })
}
