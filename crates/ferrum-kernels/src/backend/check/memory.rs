//! Copies, and the bytes of dense weights.

use super::{elements, len, require};
use crate::backend::{Backend, CopyColumnsShape, DeviceBuffer};
use ferrum_types::{Element, Error, Result};
use std::any::Any;
use std::ops::Range;

/// `count` elements of `buffer` from `offset` on.
///
/// # Errors
/// `Shape` when the buffer ends before; `InvalidArgument` when the sum overflows.
pub fn range(
    op: &'static str,
    what: &'static str,
    buffer: &impl DeviceBuffer,
    offset: usize,
    count: usize,
) -> Result<Range<usize>> {
    let Some(end) = offset.checked_add(count) else {
        let reason = format!("offset {offset} plus length {count} overflows");
        return Err(Error::invalid(op, reason));
    };
    len(op, what, buffer, end)?;
    Ok(offset..end)
}

/// A buffer of any element as one of the only element that `B` has an op for.
///
/// # Errors
/// `Unsupported` for a buffer of another element.
pub fn only<'a, B: Backend, T: Element, Only: Element>(
    op: &'static str,
    buffer: &'a B::Buffer<T>,
) -> Result<&'a B::Buffer<Only>> {
    let same = (buffer as &dyn Any).downcast_ref();
    same.ok_or_else(|| other_element::<B, T, Only>(op))
}

/// [`only`], to write.
pub fn only_mut<'a, B: Backend, T: Element, Only: Element>(
    op: &'static str,
    buffer: &'a mut B::Buffer<T>,
) -> Result<&'a mut B::Buffer<Only>> {
    let same = (buffer as &mut dyn Any).downcast_mut();
    same.ok_or_else(|| other_element::<B, T, Only>(op))
}

fn other_element<B: Backend, T: Element, Only: Element>(op: &'static str) -> Error {
    let (found, only) = (T::DTYPE.name(), Only::DTYPE.name());
    Error::Unsupported {
        op,
        backend: B::NAME,
        reason: format!("a buffer holds {found}, and the op exists for {only} alone"),
        hint: String::new(),
    }
}

/// [`Backend::copy_columns`](crate::Backend::copy_columns): whether there is something to copy.
pub fn copy_columns(
    src: &impl DeviceBuffer,
    dst: &impl DeviceBuffer,
    shape: CopyColumnsShape,
) -> Result<bool> {
    let op = "copy_columns";
    let rows = shape.rows;
    let sides = [
        ("src", src.len(), shape.src_first, shape.src_width),
        ("dst", dst.len(), shape.dst_first, shape.dst_width),
    ];
    for (what, found, first, width) in sides {
        let fits = first.checked_add(shape.len).is_some_and(|end| end <= width);
        require(op, fits, || {
            format!(
                "{} columns from {first} of rows of {width} in {what}",
                shape.len
            )
        })?;
        Error::check_len(op, what, found, elements(op, &[rows, width])?)?;
    }
    Ok(rows > 0 && shape.len > 0)
}

/// [`Backend::copy_slice`](crate::Backend::copy_slice): what is read and what is written.
pub fn copy_slice(
    src: &impl DeviceBuffer,
    src_offset: usize,
    dst: &impl DeviceBuffer,
    dst_offset: usize,
    count: usize,
) -> Result<[Range<usize>; 2]> {
    let op = "copy_slice";
    Ok([
        range(op, "src", src, src_offset, count)?,
        range(op, "dst", dst, dst_offset, count)?,
    ])
}
