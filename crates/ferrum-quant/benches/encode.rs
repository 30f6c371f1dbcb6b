//! Speed and error of the encoders.
//!
//! `cargo bench -p ferrum-quant --bench encode [-- TYPE...]` prints for each type and search the millions of
//! weights that one thread encodes in a second (the best of five runs), without and with importance, and the
//! root mean square error in units of the numbers' own: of normal numbers, of Student's t with 4 degrees of
//! freedom, and by importance with it.

#![allow(clippy::unwrap_used, reason = "a bench may panic")]

use ferrum_quant::{Search, can_encode, dequantize, encode_row};
use ferrum_types::GgufQuantType;
use std::hint::black_box;
use std::time::Instant;

const COLS: usize = 3072;
const ROWS: usize = 96;

/// Uniform numbers from 0 to 1 (PCG).
struct Uniform(u64);

impl Uniform {
    fn next(&mut self) -> f32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let word = ((self.0 >> 18) ^ self.0) >> 27;
        let word = (word as u32).rotate_right((self.0 >> 59) as u32);
        (word >> 8) as f32 / (1u32 << 24) as f32
    }

    fn normal(&mut self) -> f32 {
        let (radius, angle) = (1.0 - self.next(), self.next());
        (-2.0 * radius.ln()).sqrt() * (std::f32::consts::TAU * angle).cos()
    }

    /// Student's t with 4 degrees of freedom.
    fn heavy(&mut self) -> f32 {
        let squares: f32 = (0..4).map(|_| self.normal().powi(2)).sum();
        self.normal() / (squares / 4.0).sqrt()
    }
}

fn encode(
    ty: GgufQuantType,
    rows: &[f32],
    importance: Option<&[f32]>,
    search: Search,
    out: &mut [u8],
) {
    let bytes = ty.bytes_for(COLS).unwrap();
    for (row, out) in rows.chunks_exact(COLS).zip(out.chunks_exact_mut(bytes)) {
        encode_row(ty, row, importance, search, out).unwrap();
    }
}

/// Millions of weights in a second.
fn speed(ty: GgufQuantType, rows: &[f32], importance: Option<&[f32]>, search: Search) -> f64 {
    let mut out = vec![0; ty.bytes_for(rows.len()).unwrap()];
    let mut run = || {
        let start = Instant::now();
        encode(ty, black_box(rows), importance, search, black_box(&mut out));
        rows.len() as f64 / start.elapsed().as_secs_f64() / 1e6
    };
    (0..5).map(|_| run()).fold(0.0, f64::max)
}

fn error(ty: GgufQuantType, rows: &[f32], importance: Option<&[f32]>, search: Search) -> f64 {
    let mut back = vec![0.0; rows.len()];
    let mut bytes = vec![0; ty.bytes_for(rows.len()).unwrap()];
    encode(ty, rows, importance, search, &mut bytes);
    dequantize(ty, &bytes, &mut back).unwrap();
    let (mut miss, mut all) = (0.0, 0.0);
    for (i, (&x, &y)) in rows.iter().zip(&back).enumerate() {
        let w = importance.map_or(1.0, |w| f64::from(w[i % COLS]));
        miss += w * f64::from(x - y).powi(2);
        all += w * f64::from(x).powi(2);
    }
    (miss / all).sqrt()
}

fn main() {
    let args: Vec<_> = std::env::args().skip(1).collect();
    let wanted: Vec<_> = args.iter().filter(|a| *a != "--bench").collect();
    let mut numbers = Uniform(1);
    let normal: Vec<f32> = (0..ROWS * COLS).map(|_| 0.02 * numbers.normal()).collect();
    let heavy: Vec<f32> = (0..ROWS * COLS).map(|_| 0.02 * numbers.heavy()).collect();
    let importance: Vec<f32> = (0..COLS).map(|_| numbers.heavy().powi(2)).collect();
    println!("type     search    Mw/s  with imp.   normal    heavy  heavy with imp.");
    for ty in GgufQuantType::all() {
        let named = wanted.is_empty() || wanted.iter().any(|w| w.eq_ignore_ascii_case(ty.name()));
        if !named || !can_encode(ty) {
            continue;
        }
        for search in [Search::Fast, Search::Thorough] {
            let with = Some(&*importance);
            println!(
                "{:8} {:9} {:5.0} {:6.0}    {:.6} {:.6} {:.6}",
                ty.name(),
                format!("{search:?}").to_lowercase(),
                speed(ty, &normal, None, search),
                speed(ty, &normal, with, search),
                error(ty, &normal, None, search),
                error(ty, &heavy, None, search),
                error(ty, &heavy, with, search),
            );
        }
    }
}
