//! Bytes of quantised weights.

use super::memory::stored_rows;
use crate::backend::QuantPart;
use ferrum_types::{Error, Result};

/// Rows of blocks with `cols` elements each: bytes of a row.
///
/// # Errors
/// `InvalidArgument` when a row is no whole number of blocks, `Shape` when the bytes are not as many
/// as the rows take.
pub fn quant_part(op: &'static str, part: &QuantPart<'_>, cols: usize) -> Result<usize> {
    let ty = part.ty;
    let row_bytes = ty.bytes_for(cols).ok_or_else(|| {
        let block = ty.block_len();
        let reason = format!("rows have {cols} elements, expected a multiple of {block} for {ty}");
        Error::invalid(op, reason)
    })?;
    stored_rows(op, part.bytes, part.rows, row_bytes, part.row_stride)?;
    Ok(row_bytes)
}
