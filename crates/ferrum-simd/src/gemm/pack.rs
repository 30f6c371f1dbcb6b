//! Packed forms: weights in panels of columns, activations in tiles of rows.
//!
//! A panel holds 32 output features interleaved along `k`, so that a step of `k` is one or two cache
//! lines with one feature for each lane. bf16 features `j` and `j + 16` share a 32-bit lane, low and
//! high: a shift and a mask make two f32 vectors of one load. Where the processor has dot products of
//! bf16, a lane is two inputs of one feature instead. The last panel is filled with zeros.

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::e4m3;
pub(crate) use super::format::{Bf16, Bf16Pairs, F16, F32, Format, SplitF32};
use super::format::{SPLIT_LOW, split_place};
use super::lane::Lane;
use super::tile::{Columns, MAX_ROWS, PANEL};
use crate::exec::Exec;
use crate::isa::{Kernel, Level};
use crate::memory::{CpuBuffer, SharedBytes, SharedMut};
use crate::panels::{
    LaneRows, PanelSource, SPLIT_INPUTS, Transposed, VECTOR_BYTES, put_low_halves, put_vector,
    transpose,
};
use crate::simd::{LANES, Simd};
use ferrum_types::check::{check_weight_parts, elements};
use ferrum_types::{Error, MatShape, Result, SrcDtype, SumSplit, WeightPart};
use half::{bf16, f16};
use std::marker::PhantomData;
#[cfg(target_arch = "x86_64")]
use std::sync::atomic::{AtomicBool, Ordering};

const OP: &str = "from_weight_parts";

/// A dense matrix `[n, k]` in panels, in the precision of its file.
#[derive(Debug)]
pub struct CpuWeight {
    pub(crate) shape: MatShape,
    pub(crate) elements: Elements,
    /// How sums are cut, in steps.
    pub(crate) sums: SumSplit,
    pub(crate) data: SharedBytes,
}

/// What panels hold, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elements {
    /// f32.
    F32,
    /// f16.
    F16,
    /// bf16, two features to a lane.
    Bf16,
    /// bf16 for dot products: inputs of an even number, two to a lane.
    Bf16Pairs,
    /// FP8 codes after the scales of their segment.
    E4m3,
    /// f32 for tiles of AMX, each split in two of bf16 that are almost as much, in blocks of 32 inputs. The last is filled up with
    /// zeros.
    F32Tiles,
    /// bf16 for tiles of AMX. The bytes are those of [`Bf16Pairs`](Self::Bf16Pairs).
    Bf16Tiles,
}

/// Calls a generic function with the [`Format`] of some [`Elements`].
macro_rules! with_format {
    ($elements:expr, $f:ident => $body:expr) => {
        with_format!(@ $elements, $f, $body, {
            F32: $crate::gemm::pack::F32,
            F16: $crate::gemm::pack::F16,
            Bf16: $crate::gemm::pack::Bf16,
            Bf16Pairs: $crate::gemm::pack::Bf16Pairs,
            E4m3: $crate::gemm::e4m3::E4m3,
            F32Tiles: $crate::gemm::pack::SplitF32,
            Bf16Tiles: $crate::gemm::pack::Bf16Pairs,
        })
    };
    (@ $elements:expr, $f:ident, $body:expr, { $($name:ident: $format:ty,)* }) => {
        match $elements {
            $($crate::gemm::pack::Elements::$name => {
                type $f = $format;
                $body
            })*
        }
    };
}
pub(crate) use with_format;

impl Elements {
    /// How a matrix of `cols` inputs is kept.
    fn of(exec: &Exec, dtype: SrcDtype, cols: usize) -> Self {
        match dtype {
            SrcDtype::F32 => Elements::F32,
            SrcDtype::F16 => Elements::F16,
            SrcDtype::BF16 if exec.level.has_bf16() && cols.is_multiple_of(2) => {
                Elements::Bf16Pairs
            }
            SrcDtype::BF16 => Elements::Bf16,
        }
    }

    /// Inputs of a step.
    fn inputs(self) -> usize {
        with_format!(self, F => <F as Format>::Lane::INPUTS)
    }

    /// Whether products take panels as they lie.
    pub(crate) fn are_lanes(self) -> bool {
        matches!(
            self,
            Elements::F32 | Elements::Bf16Pairs | Elements::Bf16Tiles
        )
    }

    /// Whether products are made in tiles of AMX.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn are_tiles(self) -> bool {
        matches!(self, Elements::F32Tiles | Elements::Bf16Tiles)
    }

    /// The same for products in tiles, where the level has these and takes panels as they lie.
    fn in_tiles(self, level: Level) -> Self {
        match self {
            Elements::Bf16Pairs if level.has_tiles() => Elements::Bf16Tiles,
            other => other,
        }
    }

    /// Bytes of a panel of `cols` inputs.
    pub(crate) fn panel_bytes(self, cols: usize) -> usize {
        match self {
            Elements::F32 => cols * PANEL * 4,
            Elements::F32Tiles => cols.next_multiple_of(SPLIT_INPUTS) * PANEL * 4,
            Elements::F16 | Elements::Bf16 | Elements::Bf16Pairs | Elements::Bf16Tiles => {
                cols * PANEL * 2
            }
            Elements::E4m3 => e4m3::panel_bytes(cols),
        }
    }
}

/// Consecutive panels as the columns of a tile, two vectors for each.
#[derive(Clone, Copy)]
pub(crate) struct Panels<F> {
    pub(crate) ptr: *const u8,
    /// Bytes from one panel to the next.
    pub(crate) stride: usize,
    pub(crate) format: PhantomData<F>,
}

impl<F: Format> Columns for Panels<F> {
    type Lane = F::Lane;

    #[inline(always)]
    unsafe fn at<S: Simd, const NV: usize>(self, s: S, k: usize) -> [S::V; NV] {
        let mut out = [s.zero(); NV];
        for p in 0..NV / 2 {
            // SAFETY: the caller says that NV/2 panels have step `k`.
            let [low, high] = unsafe { F::step(s, self.ptr.add(p * self.stride), k) };
            out[2 * p] = low;
            out[2 * p + 1] = high;
        }
        out
    }
}

/// Where feature `j` of a panel of [`Bf16`] lies in a step.
#[inline(always)]
fn bf16_slot(j: usize) -> usize {
    2 * (j % LANES) + j / LANES
}

impl CpuWeight {
    /// The sizes.
    #[inline]
    pub fn shape(&self) -> MatShape {
        self.shape
    }

    /// Packs the rows of `parts` for products. Parts of different types become f32, which holds all exactly.
    ///
    /// # Errors
    /// Of parts that are not whole; [`OutOfMemory`](Error::OutOfMemory).
    pub fn pack(exec: &Exec, parts: &[WeightPart<'_>], cols: usize) -> Result<Self> {
        #[cfg(target_arch = "x86_64")]
        if exec.level.splits_f32()
            && let Some(split) = Self::split(exec, parts, cols)?
        {
            return Ok(split);
        }
        Self::pack_table(exec, parts, cols)
    }

    /// [`pack`](Self::pack) for a table whose rows are looked up: f32 is not split, so that it keeps all bits. Products may read it as well.
    ///
    /// # Errors
    /// Those of [`pack`](Self::pack).
    pub fn pack_table(exec: &Exec, parts: &[WeightPart<'_>], cols: usize) -> Result<Self> {
        let packed = Self::stack(exec, parts, cols, 1)?.pop();
        let mut packed = packed.ok_or_else(|| Error::invalid(OP, "there is no matrix"))?;
        packed.elements = packed.elements.in_tiles(exec.level);
        Ok(packed)
    }

    /// [`pack`](Self::pack) for products in tiles of split numbers, of f32 that can all be split.
    #[cfg(target_arch = "x86_64")]
    fn split(exec: &Exec, parts: &[WeightPart<'_>], cols: usize) -> Result<Option<Self>> {
        let floats = Packing::new(exec, parts, cols, 1)?;
        if floats.to != Elements::F32 {
            return Ok(None);
        }
        let packing = SplitPacking {
            floats,
            exception: AtomicBool::new(false),
        };
        let data = packing.packed(OP, exec)?;
        let rows = packing.floats.rows;
        let split = || Self::of_panels(MatShape { rows, cols }, Elements::F32Tiles, data);
        Ok((!packing.exception.into_inner()).then(split))
    }

    /// Matrices of a [`stack`](Self::stack) of experts: those of bf16 for products in tiles, where the level has these.
    pub(crate) fn experts(
        exec: &Exec,
        parts: &[WeightPart<'_>],
        cols: usize,
        count: usize,
    ) -> Result<Vec<Self>> {
        let mut matrices = Self::stack(exec, parts, cols, count)?;
        for matrix in &mut matrices {
            if matrix.elements == Elements::Bf16Pairs && cols > 0 {
                matrix.elements = matrix.elements.in_tiles(exec.level);
            }
        }
        Ok(matrices)
    }

    /// Packs the rows of `parts` into `count` matrices of equally many rows, each of equally many parts. Each has panels of its
    /// own.
    fn stack(
        exec: &Exec,
        parts: &[WeightPart<'_>],
        cols: usize,
        count: usize,
    ) -> Result<Vec<Self>> {
        let packing = Packing::new(exec, parts, cols, count)?;
        let data = packing.packed(OP, exec)?;
        let (elements, rows) = (packing.to, packing.rows);
        let shape = MatShape { rows, cols };
        let matrix = |data| Self {
            shape,
            elements,
            sums: SumSplit::WHOLE,
            data,
        };
        Ok(SharedBytes::split(data, count).map(matrix).collect())
    }

    /// A matrix of panels that are made already.
    pub(crate) fn of_panels(shape: MatShape, elements: Elements, data: CpuBuffer<u8>) -> Self {
        Self {
            shape,
            elements,
            sums: SumSplit::WHOLE,
            data: data.into(),
        }
    }

    /// Cuts the sums over inputs, unless a cut lies inside a step.
    pub fn split_sums(&mut self, split: SumSplit) {
        self.sums = split.in_terms_of(self.elements.inputs(), self.shape.cols);
    }

    /// What its panels hold.
    pub fn elements(&self) -> Elements {
        self.elements
    }

    /// Bytes of a panel.
    pub(crate) fn panel_bytes(&self) -> usize {
        self.elements.panel_bytes(self.shape.cols)
    }

    /// Steps of a panel.
    pub(crate) fn steps(&self) -> usize {
        self.shape.cols.div_ceil(self.elements.inputs())
    }

    /// Number of panels.
    pub(crate) fn panels(&self) -> usize {
        self.shape.rows.div_ceil(PANEL)
    }

    /// All panels.
    pub fn bytes(&self) -> &[u8] {
        self.data.as_slice()
    }

    /// Row `row` as f32; of split numbers, the sums of their halves.
    ///
    /// # Panics
    /// When there is no such row.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        let size = self.panel_bytes();
        let panel = &self.data.as_slice()[row / PANEL * size..][..size];
        let j = row % PANEL;
        let (dtype, slot) = match self.elements {
            Elements::F32 => (SrcDtype::F32, j),
            Elements::F16 => (SrcDtype::F16, j),
            Elements::Bf16 => (SrcDtype::BF16, bf16_slot(j)),
            Elements::Bf16Pairs | Elements::Bf16Tiles => {
                for (k, out) in out.iter_mut().enumerate().take(self.shape.cols) {
                    let at = k / 2 * PANEL * 4 + j * 4 + k % 2 * 2;
                    *out = decode(SrcDtype::BF16, &panel[at..at + 2]);
                }
                return;
            }
            Elements::F32Tiles => return read_split_row(panel, j, &mut out[..self.shape.cols]),
            Elements::E4m3 => return e4m3::read_row(panel, j, &mut out[..self.shape.cols]),
        };
        let size = dtype.size();
        for (out, step) in out.iter_mut().zip(panel.chunks_exact(PANEL * size)) {
            *out = decode(dtype, &step[slot * size..][..size]);
        }
    }
}

/// Feature `j` of a panel of split numbers.
fn read_split_row(panel: &[u8], j: usize, out: &mut [f32]) {
    let half = |place: usize| decode(SrcDtype::BF16, &panel[2 * place..2 * place + 2]);
    for (k, out) in out.iter_mut().enumerate() {
        let high = split_place(k, j);
        *out = half(high) + half(high + SPLIT_LOW);
    }
}

#[inline(always)]
fn decode(dtype: SrcDtype, bytes: &[u8]) -> f32 {
    match (dtype, bytes) {
        (SrcDtype::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (SrcDtype::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        (SrcDtype::BF16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
        _ => 0.0,
    }
}

/// Rows of floats that are packed.
pub(crate) struct Packing<'a> {
    parts: &'a [WeightPart<'a>],
    cols: usize,
    to: Elements,
    /// Rows of each matrix.
    rows: usize,
    /// Number of matrices, and parts of each.
    count: usize,
    each_parts: usize,
    /// A row for features past the last.
    zeros: Vec<u8>,
}

impl<'a> Packing<'a> {
    /// Holds `parts` against the size of `count` matrices.
    pub(crate) fn new(
        exec: &Exec,
        parts: &'a [WeightPart<'a>],
        cols: usize,
        count: usize,
    ) -> Result<Self> {
        let rows = check_weight_parts(OP, parts, cols)?;
        let each_parts = parts.len().checked_div(count).unwrap_or(0);
        let parts_of = |matrix: usize| &parts[matrix * each_parts..][..each_parts];
        let rows_of = |matrix| parts_of(matrix).iter().map(|part| part.rows).sum::<usize>();
        let even = count > 0 && rows.is_multiple_of(count) && each_parts * count == parts.len();
        if !even || (0..count).any(|matrix| rows_of(matrix) != rows / count) {
            let reason = format!("{rows} rows cannot be cut into {count} matrices");
            return Err(Error::invalid(OP, reason));
        }
        let rows = rows / count;
        let first = parts.first().map_or(SrcDtype::F32, |part| part.dtype);
        let uniform = parts.iter().all(|part| part.dtype == first);
        let dtype = if uniform { first } else { SrcDtype::F32 };
        // None that are packed here take more than f32.
        let row_bytes = elements(OP, &[cols, PANEL, 4])? / PANEL;
        Ok(Self {
            parts,
            cols,
            to: Elements::of(exec, dtype, cols),
            rows,
            count,
            each_parts,
            zeros: vec![0; row_bytes],
        })
    }
}

impl PanelSource for Packing<'_> {
    fn count(&self) -> usize {
        self.rows.div_ceil(PANEL).saturating_mul(self.count)
    }

    fn bytes(&self) -> usize {
        self.to.panel_bytes(self.cols)
    }

    fn elements_per_panel(&self) -> usize {
        self.cols * PANEL
    }

    fn pack(&self, level: Level, number: usize, panel: &mut [u8]) {
        let each = self.rows.div_ceil(PANEL);
        let parts = &self.parts[number / each * self.each_parts..][..self.each_parts];
        let row = number % each * PANEL;
        let mut rows = [(&self.zeros[..], None); PANEL];
        let mut first = 0;
        for part in parts {
            let size = self.cols * part.dtype.size();
            for r in row.max(first)..(row + PANEL).min(first + part.rows) {
                rows[r - row] = (part.row(r - first, size), Some(part.dtype));
            }
            first += part.rows;
        }
        let as_they_are = |(_, dtype): &(_, Option<SrcDtype>)| {
            self.to != Elements::F32 || !dtype.is_some_and(|dtype| dtype != SrcDtype::F32)
        };
        if rows.iter().all(as_they_are) {
            level.run(PackPanel {
                rows: LaneRows::halves(&rows.map(|(bytes, _)| bytes)),
                to: self.to,
                panel,
            });
            return;
        }
        let steps = panel.as_chunks_mut::<{ PANEL * 4 }>().0;
        for (j, (bytes, dtype)) in rows.into_iter().enumerate() {
            let dtype = dtype.unwrap_or(SrcDtype::F32);
            for (step, x) in steps.iter_mut().zip(bytes.chunks_exact(dtype.size())) {
                step[4 * j..4 * j + 4].copy_from_slice(&decode(dtype, x).to_le_bytes());
            }
        }
    }
}

/// Rows of floats that are packed in blocks of split numbers.
#[cfg(target_arch = "x86_64")]
struct SplitPacking<'a> {
    floats: Packing<'a>,
    /// Whether a number was found that cannot be split: then panels are not to be used.
    exception: AtomicBool,
}

#[cfg(target_arch = "x86_64")]
impl PanelSource for SplitPacking<'_> {
    fn count(&self) -> usize {
        self.floats.count()
    }

    fn bytes(&self) -> usize {
        Elements::F32Tiles.panel_bytes(self.floats.cols)
    }

    fn elements_per_panel(&self) -> usize {
        self.floats.elements_per_panel()
    }

    fn pack(&self, level: Level, number: usize, panel: &mut [u8]) {
        if self.exception.load(Ordering::Relaxed) {
            return;
        }
        let cols = self.floats.cols;
        let mut floats = vec![0f32; cols * PANEL];
        self.floats
            .pack(level, number, bytemuck::cast_slice_mut(&mut floats));
        if amx::pack::panel((&floats, PANEL), (0..cols, 0), panel) != 0 {
            self.exception.store(true, Ordering::Relaxed);
        }
    }
}

/// Transposes rows of one type into steps.
struct PackPanel<'a> {
    rows: [LaneRows<'a>; 2],
    to: Elements,
    panel: &'a mut [u8],
}

impl Kernel for PackPanel<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self {
            rows,
            mut to,
            panel,
        } = self;
        transpose(s, &rows, 0, panel, &mut to);
    }
}

impl<S: Simd> Transposed<S> for Elements {
    #[inline(always)]
    fn put(&mut self, s: S, low: [S::I; 4], high: [S::I; 4], out: &mut [u8]) {
        let (first, second) = (s.splat_i(0xffff), s.splat_i(0xffff_0000_u32 as i32));
        for w in 0..4 {
            let (low, high, at) = (low[w], high[w], 2 * w * VECTOR_BYTES);
            match self {
                // Two steps of sixteen bits in a word.
                Elements::F16 => {
                    for step in 0..2 {
                        let at = at + step * VECTOR_BYTES;
                        put_low_halves(s, out, at, s.shr_i(low, 16 * step));
                        put_low_halves(s, out, at + VECTOR_BYTES / 2, s.shr_i(high, 16 * step));
                    }
                }
                // The same with features `j` and `j + 16` in one lane.
                Elements::Bf16 => {
                    let step = s.or_i(s.and_i(low, first), s.shl_i(high, 16));
                    put_vector(s, out, at, step);
                    let step = s.or_i(s.shr_i(low, 16), s.and_i(high, second));
                    put_vector(s, out, at + VECTOR_BYTES, step);
                }
                // Two inputs of bf16 that follow one another are a lane already.
                _ => {
                    put_vector(s, out, at, low);
                    put_vector(s, out, at + VECTOR_BYTES, high);
                }
            }
        }
    }
}

/// Packs rows of `x` (`[rows, k]`) into tiles: each is `[steps][rows of the tile]` lanes, one after the
/// other.
pub(crate) fn pack_rows<L: Lane>(
    exec: &Exec,
    x: &[f32],
    k: usize,
    tile_rows: usize,
    out: SharedMut<'_, f32>,
) {
    let rows = x.len().checked_div(k).unwrap_or(0);
    let steps = k / L::INPUTS;
    debug_assert!(tile_rows <= MAX_ROWS && k.is_multiple_of(L::INPUTS));
    exec.parallel_for(rows.div_ceil(tile_rows), tile_rows * k, |tiles, _| {
        for t in tiles {
            let first = t * tile_rows;
            let count = tile_rows.min(rows - first);
            // SAFETY: each tile is packed by one task, and tiles do not overlap.
            let out = unsafe { out.part(first * steps, count * steps) };
            pack_tile::<L>(exec, count, |i| &x[(first + i) * k..][..k], out);
        }
    });
}

/// Fewer rows are packed one after the other: of a transposed vector they would use a few lanes.
const TRANSPOSED_ROWS: usize = 4;

/// Packs a tile of `count` rows.
pub(crate) fn pack_tile<'a, L: Lane>(
    exec: &Exec,
    count: usize,
    of: impl Fn(usize) -> &'a [f32],
    out: &mut [f32],
) {
    if L::INPUTS == 1 && (TRANSPOSED_ROWS..=LANES).contains(&count) {
        // Lanes past the last row get it again.
        let rows = std::array::from_fn(|i| of(i.min(count - 1)));
        return exec.level.run(TransposedRows { rows, count, out });
    }
    // Blocks of steps keep the lines that are being filled in the first-level cache.
    const STEPS: usize = 64;
    for (b, block) in out.chunks_mut(STEPS * count).enumerate() {
        for i in 0..count {
            let source = &of(i)[b * STEPS * L::INPUTS..][..block.len() / count * L::INPUTS];
            let lanes = source.chunks_exact(L::INPUTS).map(L::of);
            for (to, from) in block[i..].iter_mut().step_by(count).zip(lanes) {
                *to = from;
            }
        }
    }
}

/// `out[step · count + row] = rows[row][step]` for the first `count` rows.
struct TransposedRows<'a> {
    rows: [&'a [f32]; LANES],
    count: usize,
    out: &'a mut [f32],
}

impl Kernel for TransposedRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        /// Steps of one transposition.
        const STEPS: usize = 4;
        let Self { rows, count, out } = self;
        let steps = out.len() / count;
        let mut starts = [std::ptr::null(); LANES];
        for (start, row) in starts.iter_mut().zip(&rows) {
            *start = row[..steps].as_ptr().cast::<u8>();
        }
        let mut step = 0;
        // A vector is stored whole: its lanes past the last row are overwritten by the steps after it.
        while step + STEPS <= steps && (step + STEPS - 1) * count + LANES <= out.len() {
            let place = out.as_mut_ptr().wrapping_add(step * count);
            // SAFETY: each row has so many steps (sliced so), and the place of each vector lies inside.
            unsafe {
                let [a, b, c, d] = s.load_rows(&starts, step * size_of::<f32>());
                s.store_i(place.cast(), a);
                s.store_i(place.add(count).cast(), b);
                s.store_i(place.add(2 * count).cast(), c);
                s.store_i(place.add(3 * count).cast(), d);
            }
            step += STEPS;
        }
        for step in step..steps {
            for row in 0..count {
                out[step * count + row] = rows[row][step];
            }
        }
    }
}
