//! What GPTQ and AWQ share: size checks, and the walk over a packed matrix that writes its
//! transpose.
//!
//! Both store `[in, out]` and are wanted as `[out, in]`. Going through either side in its own order
//! touches one number per cache line of the other, and powers of two as widths make those lines
//! evict one another; so the walk takes small tiles, whose transpose is in a buffer on the stack.

use crate::block::F16Le;
use crate::error::{QuantError, Result};

/// Output features in a tile.
pub(crate) const TILE_COLUMNS: usize = 16;
/// Input features in a tile: whole packing units of every width.
pub(crate) const TILE_ROWS: usize = 64;

/// Codes of a tile, `[out, in]`.
pub(crate) type Tile = [[u8; TILE_ROWS]; TILE_COLUMNS];

/// The shape of a layer and the name of its format.
#[derive(Clone, Copy)]
pub(crate) struct Matrix {
    pub(crate) format: &'static str,
    pub(crate) in_features: usize,
    pub(crate) out_features: usize,
}

impl Matrix {
    /// in × out; all other sizes of a layer are at most that.
    pub(crate) fn elements(self) -> Result<usize> {
        let too_large = QuantError::TooLarge {
            format: self.format,
            in_features: self.in_features,
            out_features: self.out_features,
        };
        self.in_features
            .checked_mul(self.out_features)
            .ok_or(too_large)
    }

    /// Checks a parameter: an error unless `ok`.
    pub(crate) fn check_parameter(
        self,
        ok: bool,
        what: &'static str,
        found: usize,
        expected: &'static str,
    ) -> Result<()> {
        if ok {
            return Ok(());
        }
        Err(QuantError::Parameter {
            format: self.format,
            what,
            found: i64::try_from(found).unwrap_or(i64::MAX),
            expected,
        })
    }

    /// Checks that the slice of an argument has `expected` elements.
    pub(crate) fn check_len(
        self,
        argument: &'static str,
        found: usize,
        expected: usize,
    ) -> Result<()> {
        if found == expected {
            return Ok(());
        }
        Err(QuantError::LayerLength {
            format: self.format,
            argument,
            found,
            expected,
        })
    }

    /// The bytes of a tensor as `expected` elements of `B` bytes.
    pub(crate) fn tensor<'a, const B: usize>(
        self,
        tensor: &'static str,
        bytes: &'a [u8],
        expected: usize,
    ) -> Result<&'a [[u8; B]]> {
        let (elements, rest) = bytes.as_chunks();
        if elements.len() == expected && rest.is_empty() {
            return Ok(elements);
        }
        Err(QuantError::TensorBytes {
            format: self.format,
            tensor,
            found: bytes.len(),
            expected: expected.saturating_mul(B),
        })
    }

    /// Walks the matrix by tiles and calls `each(column, first input feature, codes)` for every
    /// column of every tile; `fill` writes the codes of the tile at `(row, column)`.
    pub(crate) fn for_each_span(
        self,
        fill: impl Fn(usize, usize, &mut Tile),
        mut each: impl FnMut(usize, usize, &[u8]),
    ) {
        let mut tile = [[0; TILE_ROWS]; TILE_COLUMNS];
        for column in (0..self.out_features).step_by(TILE_COLUMNS) {
            for row in (0..self.in_features).step_by(TILE_ROWS) {
                fill(row, column, &mut tile);
                let rows = TILE_ROWS.min(self.in_features - row);
                for (codes, column) in tile.iter().zip(column..self.out_features) {
                    each(column, row, &codes[..rows]);
                }
            }
        }
    }
}

/// Half-precision scales in f32.
pub(crate) fn half_floats(scales: &[[u8; 2]]) -> Vec<f32> {
    scales.iter().map(|&bits| F16Le(bits).to_f32()).collect()
}

/// Group indices of a file, checked against the number of groups.
pub(crate) fn group_indices(
    format: &'static str,
    indices: &[[u8; 4]],
    groups: usize,
) -> Result<Vec<usize>> {
    let indices = indices.iter().copied().map(i32::from_le_bytes);
    let checked = indices.enumerate().map(|(position, found)| {
        let group = usize::try_from(found).ok().filter(|&group| group < groups);
        group.ok_or(QuantError::GroupIndex {
            format,
            position,
            found,
            groups,
        })
    });
    checked.collect()
}

/// Scales and zero points of a layer, `[groups, out]`, and the group of each input feature.
pub(crate) struct Groups<'a> {
    pub(crate) scales: &'a [[u8; 2]],
    pub(crate) zeros: &'a [u8],
    pub(crate) group_of_input: &'a [usize],
    pub(crate) out_features: usize,
}

impl Groups<'_> {
    /// Decodes the codes of one column from input feature `first` on.
    #[inline]
    pub(crate) fn decode(&self, column: usize, first: usize, codes: &[u8], out: &mut [f32]) {
        let mut done = 0;
        // Runs of one group have constants that let the inner loop be vectorised.
        for run in self.group_of_input[first..][..codes.len()].chunk_by(|a, b| a == b) {
            let Some(group) = run.first() else { continue };
            let at = group * self.out_features + column;
            let (scale, zero) = (F16Le(self.scales[at]).to_f32(), i32::from(self.zeros[at]));
            let codes = &codes[done..][..run.len()];
            for (out, &code) in out[done..].iter_mut().zip(codes) {
                *out = scale * (i32::from(code) - zero) as f32;
            }
            done += run.len();
        }
    }
}
