//! The checks with which every op begins.

use super::buffer::CpuBuffer;
use ferrum_types::{Element, Error, Result};

impl<T: Element> CpuBuffer<T> {
    /// The first `len` elements; [`Error::Shape`] when there are fewer.
    pub(crate) fn first(&self, op: &'static str, what: &'static str, len: usize) -> Result<&[T]> {
        Error::check_len(op, what, self.as_slice().len(), len)?;
        Ok(&self.as_slice()[..len])
    }

    /// [`first`](Self::first), to write to.
    pub(crate) fn first_mut(
        &mut self,
        op: &'static str,
        what: &'static str,
        len: usize,
    ) -> Result<&mut [T]> {
        Error::check_len(op, what, self.as_slice().len(), len)?;
        Ok(&mut self.as_mut_slice()[..len])
    }

    /// `len` elements from `offset` on.
    pub(crate) fn range(
        &self,
        op: &'static str,
        what: &'static str,
        offset: usize,
        len: usize,
    ) -> Result<&[T]> {
        Ok(&self.first(op, what, end(op, offset, len)?)?[offset..])
    }

    /// [`range`](Self::range), to write to.
    pub(crate) fn range_mut(
        &mut self,
        op: &'static str,
        what: &'static str,
        offset: usize,
        len: usize,
    ) -> Result<&mut [T]> {
        Ok(&mut self.first_mut(op, what, end(op, offset, len)?)?[offset..])
    }
}

fn end(op: &'static str, offset: usize, len: usize) -> Result<usize> {
    offset
        .checked_add(len)
        .ok_or_else(|| Error::invalid(op, format!("offset {offset} plus length {len} overflows")))
}

/// The product of `dims`: how many elements a shape has.
pub(crate) fn elements(op: &'static str, dims: &[usize]) -> Result<usize> {
    // A zero makes the shape empty, however large the other sizes are.
    if dims.contains(&0) {
        return Ok(0);
    }
    dims.iter()
        .try_fold(1usize, |product, dim| product.checked_mul(*dim))
        .ok_or_else(|| Error::invalid(op, format!("{dims:?} elements overflow the address space")))
}

/// `Ok` when `holds`, else [`Error::InvalidArgument`] with the reason.
pub(crate) fn require(
    op: &'static str,
    holds: bool,
    reason: impl FnOnce() -> String,
) -> Result<()> {
    if holds {
        Ok(())
    } else {
        Err(Error::invalid(op, reason()))
    }
}

/// `id` as an index below `count`; [`Error::InvalidArgument`] otherwise.
pub(crate) fn index(op: &'static str, what: &'static str, id: i32, count: usize) -> Result<usize> {
    usize::try_from(id)
        .ok()
        .filter(|index| *index < count)
        .ok_or_else(|| Error::invalid(op, format!("{what} is {id}, expected 0 to below {count}")))
}
