//! Resampling with antialiasing, as Pillow does it for eight-bit pixels, to the bit: weights in fixed point with 22 bits
//! behind the point, along rows and along columns, rounded to eight bits between them.
//!
//! Image encoders have learned from such pixels, and a preprocessor that rounds otherwise causes
//! differences that are hard to find. Source rows are read once and added to the rows that they are part of, so that the memory is that
//! of the result, whatever the size of the source.

use super::RgbImage;
use std::f64::consts::PI;
use std::ops::Range;

/// What a pixel of the result is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// The mean of the pixels below it.
    Box,
    /// A triangle.
    Bilinear,
    /// A Hamming window over one period.
    Hamming,
    /// Keys' cubic convolution with a = -1/2.
    Bicubic,
    /// Lanczos with three lobes.
    Lanczos,
}

impl Filter {
    /// Pixels to each side that take part, at the scale of the result or of the source, whichever is coarser.
    fn support(self) -> f64 {
        match self {
            Filter::Box => 0.5,
            Filter::Bilinear | Filter::Hamming => 1.0,
            Filter::Bicubic => 2.0,
            Filter::Lanczos => 3.0,
        }
    }

    /// The weight at a distance from the centre.
    fn weight(self, x: f64) -> f64 {
        let sinc = |x: f64| match x == 0.0 {
            true => 1.0,
            false => (x * PI).sin() / (x * PI),
        };
        let distance = x.abs();
        match self {
            Filter::Box => f64::from(x > -0.5 && x <= 0.5),
            Filter::Bilinear => (1.0 - distance).max(0.0),
            Filter::Hamming if distance >= 1.0 => 0.0,
            Filter::Hamming => sinc(distance) * (0.54 + 0.46 * (distance * PI).cos()),
            Filter::Bicubic if distance < 1.0 => (1.5 * distance - 2.5) * distance * distance + 1.0,
            Filter::Bicubic if distance < 2.0 => {
                (((distance - 5.0) * distance + 8.0) * distance - 4.0) * -0.5
            }
            Filter::Bicubic => 0.0,
            Filter::Lanczos if (-3.0..3.0).contains(&x) => sinc(x) * sinc(x / 3.0),
            Filter::Lanczos => 0.0,
        }
    }
}

/// A part of a picture that was resized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// First column.
    pub left: usize,
    /// First row.
    pub top: usize,
    /// Columns.
    pub width: usize,
    /// Rows.
    pub height: usize,
}

/// Bits behind the point of a weight.
const PRECISION: u32 = 32 - 8 - 2;

/// Pixels in a row that make one of the result.
struct Taps {
    first: usize,
    weights: Vec<i32>,
}

/// The taps of a range of pixels of a side that is resized from `input` to `output`.
fn taps(filter: Filter, input: usize, output: usize, range: Range<usize>) -> Vec<Taps> {
    let scale = input as f64 / output as f64;
    let stretch = scale.max(1.0);
    let support = filter.support() * stretch;
    let of_pixel = |i: usize| {
        let center = (i as f64 + 0.5) * scale;
        let first = (center - support + 0.5).max(0.0) as usize;
        let end = ((center + support + 0.5).max(0.0) as usize).min(input);
        let weight = |i: usize| filter.weight((i as f64 - center + 0.5) * (1.0 / stretch));
        let weights: Vec<f64> = (first..end).map(weight).collect();
        let sum: f64 = weights.iter().sum();
        let fixed = |weight: f64| {
            let share = if sum != 0.0 { weight / sum } else { weight };
            let scaled = share * f64::from(1 << PRECISION);
            (scaled + 0.5f64.copysign(scaled)) as i32
        };
        Taps {
            first,
            weights: weights.into_iter().map(fixed).collect(),
        }
    };
    range.map(of_pixel).collect()
}

/// A sum of weighted pixels, with the half of the last bit that it began with.
fn rounded(sum: i32) -> u8 {
    (sum >> PRECISION).clamp(0, 255) as u8
}

/// Half of the last bit that is kept.
const HALF: i32 = 1 << (PRECISION - 1);

/// Whether columns are resampled before rows: where the height shrinks by far more than the width (Pillow 13; earlier versions
/// never do it).
fn is_vertical_first(image: &RgbImage, [height, width]: [usize; 2]) -> bool {
    let lost = |from: usize, to: usize| from as i64 - to as i64;
    let (rows, columns) = (lost(image.height, height), lost(image.width, width));
    rows > 0 && rows > 2 * columns
}

/// The window of `image` resized to `[height, width]`, without the rest of it.
///
/// # Panics
/// When the window is empty or ends beyond that size.
pub fn resample(
    image: &RgbImage,
    size @ [height, width]: [usize; 2],
    filter: Filter,
    window: Window,
) -> RgbImage {
    let (right, bottom) = (window.left + window.width, window.top + window.height);
    assert!(window.width > 0 && window.height > 0 && right <= width && bottom <= height);
    let columns = taps(filter, image.width, width, window.left..right);
    let rows = taps(filter, image.height, height, window.top..bottom);
    let pixels = match is_vertical_first(image, size) {
        false => resample_columns(&rows, 3 * window.width, |y, line| {
            resample_row(image.row(y), &columns, line);
        }),
        true => {
            let len = 3 * image.width;
            let tall = resample_columns(&rows, len, |y, line| line.copy_from_slice(image.row(y)));
            let mut pixels = vec![0; 3 * window.width * window.height];
            let lines = pixels.chunks_exact_mut(3 * window.width);
            for (row, line) in tall.chunks_exact(len).zip(lines) {
                resample_row(row, &columns, line);
            }
            pixels
        }
    };
    RgbImage {
        width: window.width,
        height: window.height,
        pixels,
    }
}

/// Rows of `len` samples made of source rows, which `line` gives.
fn resample_columns(rows: &[Taps], len: usize, mut line: impl FnMut(usize, &mut [u8])) -> Vec<u8> {
    // Weights add up to one and their negative part is below a third, so sums of bytes stay below 2³¹.
    let mut sums = vec![HALF; rows.len() * len];
    let mut source = vec![0u8; len];
    let end = |taps: &Taps| taps.first + taps.weights.len();
    // Rows of the result begin and end in order.
    let (mut open, source_end) = (0, rows.iter().map(end).max().unwrap_or(0));
    let source_begin = rows.first().map_or(0, |taps| taps.first);
    for y in source_begin..source_end {
        line(y, &mut source);
        while rows.get(open).is_some_and(|taps| end(taps) <= y) {
            open += 1;
        }
        for (taps, sums) in rows.iter().zip(sums.chunks_exact_mut(len)).skip(open) {
            if taps.first > y {
                break;
            }
            let Some(&weight) = taps.weights.get(y - taps.first) else {
                continue;
            };
            for (sum, &sample) in sums.iter_mut().zip(&source) {
                *sum += i32::from(sample) * weight;
            }
        }
    }
    sums.into_iter().map(rounded).collect()
}

/// A row along its length.
fn resample_row(row: &[u8], columns: &[Taps], out: &mut [u8]) {
    for (taps, out) in columns.iter().zip(out.chunks_exact_mut(3)) {
        let mut sums = [HALF; 3];
        let pixels = row[3 * taps.first..].chunks_exact(3);
        for (&weight, pixel) in taps.weights.iter().zip(pixels) {
            for (sum, &sample) in sums.iter_mut().zip(pixel) {
                *sum += i32::from(sample) * weight;
            }
        }
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = rounded(sum);
        }
    }
}
