//! Codes of group schemes, of sixteen features at once: steps of panels from the words of a file.

use super::format::{CodeLayout, STEPS, UNIT};
use super::groups::GroupQuantWeight;
use crate::panels::{LaneRows, extract_bits, put_low_bytes};
use crate::simd::{LANES, Simd, exchange};
use ferrum_quant::affine::{COLUMN_SHIFTS, PackedCodes};

/// A layer, and one of its rows.
pub(super) type Row<'a> = Option<(&'a GroupQuantWeight<'a>, usize)>;

/// The first of sixteen rows that follow one another in one layer.
pub(super) fn first_of_run<'a>(rows: &[Row<'a>]) -> Row<'a> {
    let first = rows.first().copied().flatten()?;
    let follows = |(i, row): (usize, &Row<'_>)| {
        row.is_some_and(|(layer, row)| std::ptr::eq(layer, first.0) && row == first.1 + i)
    };
    let run = rows.len() == LANES && rows.iter().enumerate().all(follows);
    run.then_some(first)
}

/// The codes of half a panel.
pub(super) enum LaneCodes<'a> {
    /// [`PackedCodes::Columns`] from the first of sixteen columns on, and words from one row to the next.
    Columns(&'a [[u8; 4]], usize),
    /// [`PackedCodes::Rows`].
    Rows(LaneRows<'a>),
    /// [`PackedCodes::Interleaved`] in the same way as columns.
    Interleaved {
        words: &'a [[u8; 4]],
        stride: usize,
        rows: &'a [Row<'a>],
    },
    /// Those that lie in none of these ways.
    Others(&'a [Row<'a>]),
}

impl<'a> LaneCodes<'a> {
    /// The codes of sixteen rows; `no_codes` is a row for those that do not exist.
    pub(super) fn new(rows: &'a [Row<'a>], no_codes: &'a [u8]) -> Self {
        let others = Self::Others(rows);
        let Some(Some((first, column))) = rows.first() else {
            return others;
        };
        let together = first_of_run(rows).is_some();
        let stride = first.affine.out_features;
        match first.codes {
            PackedCodes::Columns(words) if together => Self::Columns(&words[*column..], stride),
            PackedCodes::Interleaved(words) if together && column.is_multiple_of(8) => {
                Self::Interleaved {
                    words: &words[column / 8..],
                    stride: stride / 8,
                    rows,
                }
            }
            _ if first.order.is_none() => rows_of(rows, no_codes).map_or(others, Self::Rows),
            _ => others,
        }
    }

    /// Asks for what `count` inputs from number `first` on have in the lines of half `half` of some panels: rows
    /// that are far from one another are not found by the processor.
    #[inline(always)]
    pub(super) fn prefetch<S: Simd>(
        &self,
        s: S,
        bits: usize,
        half: usize,
        (first, count): (usize, usize),
    ) {
        let (words, stride, rows) = match *self {
            Self::Columns(words, stride) => (
                words,
                stride,
                first * bits / 32..(first + count) * bits / 32,
            ),
            // A line has something for eight halves.
            Self::Interleaved { words, stride, .. } if half.is_multiple_of(8) => {
                (words, stride, first..first + count)
            }
            _ => return,
        };
        for row in rows {
            s.prefetch(words.as_ptr().wrapping_add(row * stride).cast());
        }
    }

    /// The vectors of 32 codes of `BITS` bits, from number `first` on, as [`Codes::put`] takes them.
    #[inline(always)]
    pub(super) fn vectors<S: Simd, C: CodeLayout, const BITS: usize>(
        &self,
        s: S,
        order: Option<&[u32]>,
        first: usize,
        flip: S::I,
    ) -> [S::I; STEPS] {
        match (self, order) {
            (Self::Columns(words, stride), None) if BITS == 4 => {
                let word = |w| sixteen(s, words, (first / 8 + w) * stride);
                of_eights(s, [word(0), word(1), word(2), word(3)])
            }
            (Self::Rows(rows), None) if BITS == 4 => of_eights(s, rows.words(s, first / 2)),
            _ => C::vectors(s, &self.steps::<S, BITS>(s, order, first), flip),
        }
    }

    /// The steps of 32 codes of `BITS` bits, from number `first` on, in the order in which they are multiplied.
    #[inline(always)]
    pub(super) fn steps<S: Simd, const BITS: usize>(
        &self,
        s: S,
        order: Option<&[u32]>,
        first: usize,
    ) -> [S::I; STEPS] {
        let order = order.map(|order| &order[first..first + UNIT]);
        match (self, order) {
            (Self::Columns(words, stride), None) => {
                let mut stream = [s.splat_i(0); 8];
                for (w, stream) in stream[..BITS].iter_mut().enumerate() {
                    *stream = sixteen(s, words, (first * BITS / 32 + w) * stride);
                }
                of_stream::<S, BITS>(s, &stream)
            }
            (Self::Columns(words, stride), Some(inputs)) => {
                group_of_input::<S, BITS>(s, words, *stride, inputs)
            }
            (Self::Rows(rows), None) => {
                let at = first * BITS / 8;
                let [a, b, c, d] = rows.words(s, at);
                match BITS {
                    8 => rows.eight_words(s, at),
                    _ => of_stream::<S, BITS>(s, &[a, b, c, d, a, b, c, d]),
                }
            }
            // Twice as many words are taken as are used, which only the last row may lack.
            (Self::Interleaved { words, stride, .. }, None)
                if (first + UNIT - 1) * stride + 4 <= words.len() =>
            {
                of_interleaved(s, words, *stride, first)
            }
            (Self::Interleaved { rows, .. } | Self::Others(rows), _) => {
                one_by_one(s, rows, order, first)
            }
            (Self::Rows(_), Some(_)) => [s.splat_i(0); STEPS],
        }
    }
}

/// The columns of layers in another order than their own, sixteen to a list: what follows takes them one row
/// at a time from anywhere, and would take each line of a file eight times.
pub(super) fn gathered(codes: &[LaneCodes<'_>], rows: usize) -> Vec<Vec<[u8; 4]>> {
    let mut lists: Vec<_> = codes
        .iter()
        .map(|_| Vec::with_capacity(rows * LANES))
        .collect();
    for row in 0..rows {
        for (codes, list) in codes.iter().zip(&mut lists) {
            if let LaneCodes::Columns(words, stride) = codes {
                list.extend_from_slice(&words[row * stride..][..LANES]);
            }
        }
    }
    lists
}

/// The steps of 32 codes that lie anyhow.
#[inline(always)]
fn one_by_one<S: Simd>(
    s: S,
    rows: &[Row<'_>],
    order: Option<&[u32]>,
    first: usize,
) -> [S::I; STEPS] {
    let mut codes = [[0; UNIT]; LANES];
    for (codes, row) in codes.iter_mut().zip(rows) {
        let Some((layer, row)) = *row else { continue };
        for (i, code) in codes.iter_mut().enumerate() {
            let input = order.map_or(first + i, |order| order[i] as usize);
            *code = layer.codes.code(&layer.affine, row, input);
        }
    }
    LaneRows::of(&codes).eight_words(s, 0)
}

/// Rows of words, if all that exist are such.
fn rows_of<'a>(rows: &[Row<'a>], no_codes: &'a [u8]) -> Option<LaneRows<'a>> {
    let mut found = [no_codes; LANES];
    for (found, row) in found.iter_mut().zip(rows) {
        if let Some((layer, row)) = row {
            let PackedCodes::Rows(words) = layer.codes else {
                return None;
            };
            let each = layer.affine.in_features * layer.affine.bits as usize / 32;
            *found = words[row * each..][..each].as_flattened();
        }
    }
    Some(LaneRows::new(&found))
}

/// Sixteen words from number `at` on.
#[inline(always)]
fn sixteen<S: Simd>(s: S, words: &[[u8; 4]], at: usize) -> S::I {
    let words = &words[at..at + LANES];
    // SAFETY: sixteen words are a vector.
    unsafe { s.load_i(words.as_ptr().cast()) }
}

/// The steps of 32 codes that are a stream of bits in each lane.
#[inline(always)]
fn of_stream<S: Simd, const BITS: usize>(s: S, words: &[S::I; 8]) -> [S::I; STEPS] {
    let mut steps = [s.splat_i(0); STEPS];
    for (t, step) in steps.iter_mut().enumerate() {
        let (word, shift) = (4 * BITS * t / 32, 4 * BITS * t % 32);
        let mut four = s.shr_i(words[word], shift);
        if shift + 4 * BITS > 32 {
            four = s.or_i(four, s.shl_i(words[word + 1], 32 - shift));
        }
        // Four codes side by side: two of them to the upper half, then one of each half to its upper byte.
        let mask = |codes: usize| ((1u64 << (codes * BITS)) - 1) as u32;
        let four = s.and_i(four, s.splat_i(mask(4) as i32));
        let pairs = s.or_i(four, s.shl_i(four, 16 - 2 * BITS));
        let pairs = s.and_i(pairs, s.splat_i((mask(2) * 0x0001_0001) as i32));
        let bytes = s.or_i(pairs, s.shl_i(pairs, 8 - BITS));
        *step = s.and_i(bytes, s.splat_i((mask(1) * 0x0101_0101) as i32));
    }
    steps
}

/// The vectors of 32 codes of four bits, eight of which follow one another in each lane of a word: step `t` of
/// them lies beside step `t + 4` in vector `t`.
#[inline(always)]
fn of_eights<S: Simd>(s: S, words: [S::I; 4]) -> [S::I; STEPS] {
    let two = |low, high| {
        // Codes of even numbers and of odd ones.
        let (even, odd) = exchange(s, low, high, 4, 0x0f0f_0f0f);
        s.zip_bytes(even, odd)
    };
    let [a, b] = two(words[0], words[2]);
    let [c, d] = two(words[1], words[3]);
    [a, b, c, d, d, d, d, d]
}

/// The steps of some inputs of sixteen columns.
#[inline(always)]
fn group_of_input<S: Simd, const BITS: usize>(
    s: S,
    words: &[[u8; 4]],
    stride: usize,
    inputs: &[u32],
) -> [S::I; STEPS] {
    let mut steps = [s.splat_i(0); STEPS];
    for (i, &input) in inputs.iter().enumerate().take(UNIT) {
        let (word, shift) = (input as usize * BITS / 32, input as usize * BITS % 32);
        let mut code = s.shr_i(sixteen(s, words, word * stride), shift);
        if shift + BITS > 32 {
            let next = sixteen(s, words, (word + 1) * stride);
            code = s.or_i(code, s.shl_i(next, 32 - shift));
        }
        let code = s.and_i(code, s.splat_i((1 << BITS) - 1));
        steps[i / 4] = s.or_i(steps[i / 4], s.shl_i(code, i % 4 * 8));
    }
    steps
}

/// The steps of 32 inputs of sixteen interleaved columns.
#[inline(always)]
fn of_interleaved<S: Simd>(s: S, words: &[[u8; 4]], stride: usize, first: usize) -> [S::I; STEPS] {
    // A lane is an input first, so what a shift leaves of a word belongs to one feature.
    let mut codes = [[0; UNIT]; LANES];
    for inputs in 0..UNIT / LANES {
        let mut rows = [words.as_ptr().cast::<u8>(); LANES];
        for (i, row) in rows.iter_mut().enumerate() {
            let at = (first + inputs * LANES + i) * stride;
            *row = words[at..at + 4].as_ptr().cast();
        }
        // SAFETY: four words of four bytes each.
        let eights = unsafe { s.load_rows(&rows, 0) };
        for (column, codes) in codes.iter_mut().enumerate() {
            let code = extract_bits(
                s,
                eights[column / 8],
                COLUMN_SHIFTS[column % 8] as usize,
                0x0f,
            );
            put_low_bytes(s, codes, inputs * LANES, code);
        }
    }
    LaneRows::of(&codes).eight_words(s, 0)
}
