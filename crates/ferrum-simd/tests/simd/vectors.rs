//! Every operation of every level beside its meaning, which is [`Scalar`]; products of
//! bf16 beside f64.

use ferrum_simd::isa::{ByteKernel, Isa, Kernel, Level};
use ferrum_simd::math;
use ferrum_simd::simd::{ByteProducts, LANES, Simd, scalar::Scalar};
use ferrum_test_support::available;
use half::bf16;

/// The bits of everything that an operation gave, under its name.
type Found = Vec<(String, Vec<u32>)>;

/// Numbers at the ends of what f32 holds, and some between.
const NUMBERS: [f32; 23] = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1.5,
    -2.5,
    3.0,
    127.0,
    -1e-3,
    1e-40,
    -1e-45,
    f32::MIN_POSITIVE,
    f32::MAX,
    f32::MIN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    std::f32::consts::PI,
    16_777_217.0,
    -88.5,
    88.7,
    1e20,
];

/// Numbers whose sum depends on the order of additions.
const INEXACT: [f32; 11] = [
    0.1,
    -1e-3,
    std::f32::consts::PI,
    1.0 / 3.0,
    1e5,
    -16_777_217.0,
    7.7,
    -0.3,
    1e-40,
    12_345.678,
    -2.0 / 7.0,
];

/// Every operation on the same inputs.
struct Everything;

fn number_bits(x: [f32; LANES]) -> Vec<u32> {
    // Which NaN is not part of a result.
    let canonical = |x: f32| if x.is_nan() { f32::NAN } else { x };
    x.into_iter().map(canonical).map(f32::to_bits).collect()
}

/// Lanes `i + step·lane` of a list that begins again at its end.
fn around<T: Copy, const N: usize>(list: &[T], first: usize, step: usize) -> [T; N] {
    std::array::from_fn(|lane| list[(first + step * lane) % list.len()])
}

/// 64 bytes, or as many as a test asks for, that differ from seed to seed.
fn bytes<const N: usize>(seed: usize) -> [u8; N] {
    std::array::from_fn(|i| ((seed * 131 + i + 1).wrapping_mul(0x9e37_79b1) >> 13) as u8)
}

/// Bytes as signed ones without -128, for factors that are activations.
fn activation(seed: usize) -> i32 {
    let extremes = [[127u8; 4], [0x81; 4], [127, 0x81, 127, 0x81], [0; 4]];
    let bytes = extremes.get(seed).copied().unwrap_or(bytes(seed));
    i32::from_le_bytes(bytes.map(|b| if b == 0x80 { 0 } else { b }))
}

impl Everything {
    #[inline(always)]
    fn of_floats<S: Simd>(s: S, found: &mut Found) {
        for step in [1, 2, 5] {
            for (first, number) in NUMBERS.into_iter().enumerate() {
                let a = s.lanes(around(&NUMBERS, first, 1));
                let b = s.lanes(around(&NUMBERS, 3 * first + step, step));
                let c = s.lanes(around(&NUMBERS, 7 * first + 2, 4));
                let mut note = |name: &str, v| {
                    found.push((format!("{name} {first} {step}"), number_bits(s.to_array(v))));
                };
                note("add", s.add(a, b));
                note("sub", s.sub(a, b));
                note("mul", s.mul(a, b));
                note("div", s.div(a, b));
                note("fma", s.fma(a, b, c));
                note("fnma", s.fnma(a, b, c));
                note("max", s.max(a, b));
                note("min", s.min(a, b));
                note("select_lt", s.select_lt(a, b, c, a));
                note("abs", s.abs(a));
                note("splat", s.splat(number));
                note("exp", math::exp(s, a));
                note("tanh", math::tanh(s, a));
                note("silu", math::silu(s, a));
                note("gelu", math::gelu(s, a));
                note("gelu_tanh", math::gelu_tanh(s, a));
                let inexact = around(&INEXACT, first, step);
                note("sum", s.splat(s.sum(s.lanes(inexact))));
                note("largest", s.splat(s.largest(a)));
                for (name, few) in [
                    ("largest of zeros", &[0.0, -0.0][..]),
                    ("largest below zero", &[-1.0, -2.5, -1e-3, -1.0, -88.5][..]),
                ] {
                    note(name, s.splat(s.largest(s.lanes(around(few, first, step)))));
                }
                let part = first % (LANES + 1);
                let some = s.load_part(&around::<f32, LANES>(&NUMBERS, first, 1)[..part], 0.25);
                note("load_part", some);
                let mut out = [0.0; LANES];
                s.store_part(&mut out[..part], a);
                note("store_part", s.lanes(out));
            }
        }
    }

    /// What `1.5·2^23` leaves in the low bits.
    #[inline(always)]
    fn of_magic<S: Simd>(s: S, found: &mut Found) {
        let magic = s.splat(12_582_912.0);
        for first in (-127..=113).step_by(15) {
            let numbers = |most| std::array::from_fn(|i| (first + i as i32).min(most) as f32);
            let v = |most| s.add(s.lanes(numbers(most)), magic);
            let power = s.to_array(s.pow2_of_magic(v(128)));
            found.push((format!("pow2_of_magic {first}"), number_bits(power)));
            let mut note = |name: String, v| {
                let (words, sum) = s.bytes_of_magic(v);
                let words = words.into_iter().chain([sum]).map(|x| x as u32);
                found.push((name, words.collect()));
            };
            note(format!("bytes_of_magic {first}"), v(127));
            // What is there where no number was: the low byte of any bits.
            let bits = |i: usize| 0x1234_5678_u32.rotate_left((first + 127) as u32 + 3 * i as u32);
            let any = std::array::from_fn(|i| f32::from_bits((bits(i) & !0xff) | 0x80));
            note(format!("bytes_of_magic {first}, -128"), s.lanes(any));
            let any = std::array::from_fn(|i| f32::from_bits(bits(i)));
            note(format!("bytes_of_magic {first}, any bits"), s.lanes(any));
        }
        for first in 0..NUMBERS.len() {
            let (words, sum) = s.bytes_of_magic(s.lanes(around(&NUMBERS, first, 1)));
            let words = words.into_iter().chain([sum]).map(|x| x as u32);
            found.push((format!("bytes_of_magic of number {first}"), words.collect()));
        }
    }

    /// All codes of the small floats, from places of any alignment.
    #[inline(always)]
    fn of_small_floats<S: Simd>(s: S, found: &mut Found) {
        let mut halves = [0u16; LANES + 1];
        for first in (0..=u16::MAX).step_by(LANES) {
            for at in [0, 1] {
                for (i, code) in halves[at..][..LANES].iter_mut().enumerate() {
                    *code = first + i as u16;
                }
                let p = halves[at..].as_ptr();
                // SAFETY: sixteen codes lie there.
                let (f16, bf16) = unsafe { (s.load_f16(p), s.load_bf16(p)) };
                let name = format!("f16 {first} {at}");
                found.push((name, number_bits(s.to_array(f16))));
                let name = format!("bf16 {first} {at}");
                found.push((name, number_bits(s.to_array(bf16))));
                // Halfway to the next number, where there is one, and what is nothing special.
                let between = s.fma(f16, s.splat(1.0 / 2048.0), f16);
                for (which, v) in [("the same", f16), ("between", between), ("wide", bf16)] {
                    let mut stored = [0u16; LANES + 1];
                    // SAFETY: there is room for sixteen.
                    let back = unsafe {
                        s.store_f16(stored[at..].as_mut_ptr(), v);
                        s.load_f16(stored[at..].as_ptr())
                    };
                    let name = format!("store_f16 {which} {first} {at}");
                    found.push((name, number_bits(s.to_array(back))));
                }
            }
        }
        let codes: [u8; 256] = std::array::from_fn(|i| i as u8);
        for at in 0..=256 - LANES {
            let p = codes[at..].as_ptr();
            // SAFETY: sixteen codes lie there.
            let all = unsafe { [s.load_e4m3(p), s.load_i8(p.cast()), s.load_u8(p)] };
            let numbers: [u8; LANES] =
                std::array::from_fn(|i| codes[at + i].min(codes[at + i] & 0x80 | 0x7e));
            // SAFETY: as above.
            let small = unsafe { s.load_small_e4m3(numbers.as_ptr()) };
            let names = ["e4m3", "i8", "u8", "small e4m3"];
            for (name, v) in names.into_iter().zip(all.into_iter().chain([small])) {
                found.push((format!("{name} {at}"), number_bits(s.to_array(v))));
            }
        }
        let pairs: [u32; LANES + 1] = std::array::from_fn(|i| 0x1234_5678u32.rotate_left(i as u32));
        for at in [0, 1] {
            // SAFETY: sixteen pairs lie there.
            let both = unsafe { s.load_bf16_pairs(pairs[at..].as_ptr()) };
            for v in both {
                found.push((format!("bf16 pairs {at}"), number_bits(s.to_array(v))));
            }
        }
    }

    #[inline(always)]
    fn of_integers<S: Simd>(s: S, found: &mut Found) {
        for seed in 0..40 {
            let (a, b): ([u8; 65], [u8; 65]) = (bytes(seed), bytes(seed + 1000));
            let mut note = |name: String, v| found.push((name, lanes_of(s, v)));
            for at in [0, 1] {
                // SAFETY: sixty-four bytes lie there.
                let (a, b) = unsafe { (s.load_i(a[at..].as_ptr()), s.load_i(b[at..].as_ptr())) };
                note(format!("load_i {seed} {at}"), a);
                note(format!("add_i {seed} {at}"), s.add_i(a, b));
                note(format!("and_i {seed} {at}"), s.and_i(a, b));
                note(format!("or_i {seed} {at}"), s.or_i(a, b));
                note(format!("xor_i {seed} {at}"), s.xor_i(a, b));
                let zipped = s.zip_bytes(a, b);
                note(format!("zip_bytes low {seed} {at}"), zipped[0]);
                note(format!("zip_bytes high {seed} {at}"), zipped[1]);
                let (mut halves, mut low) = ([0u16; LANES], [0u8; LANES]);
                // SAFETY: sixteen elements each.
                unsafe {
                    s.store_low_halves(halves.as_mut_ptr(), a);
                    s.store_low_bytes(low.as_mut_ptr(), a);
                }
                note("low halves".into(), ints(s, halves.map(i32::from)));
                note("low bytes".into(), ints(s, low.map(i32::from)));
                let table = bytes(seed + 2000);
                let small = s.and_i(a, s.splat_i(0x0f0f_0f0f));
                note(format!("lookup {seed} {at}"), s.lookup(table, small));
                let float = s.to_array(s.to_f32(a)).map(|x| x.to_bits() as i32);
                note(format!("to_f32 {seed} {at}"), ints(s, float));
                for n in [0, 1, 7, 16, 31] {
                    note(format!("shr_i {seed} {at} {n}"), s.shr_i(a, n));
                    note(format!("shl_i {seed} {at} {n}"), s.shl_i(a, n));
                }
            }
        }
    }

    /// Rows that lie anywhere, and what of them is taken.
    #[inline(always)]
    fn of_rows<S: Simd>(s: S, found: &mut Found) {
        let data: [u8; 512] = bytes(3);
        for at in [0, 1, 18] {
            let rows = [
                7, 0, 90, 30, 31, 32, 200, 5, 477, 9, 9, 300, 13, 128, 64, 255,
            ];
            // SAFETY: each row has at least 512 - 477 bytes, of which `at + 16` are read.
            let words = unsafe { s.load_rows(&rows.map(|row| data[row..].as_ptr()), at) };
            for (i, words) in words.into_iter().enumerate() {
                let lanes = lanes_of(s, words);
                let expected = rows.map(|row| {
                    let word = &data[row + at + 4 * i..][..4];
                    u32::from_le_bytes([word[0], word[1], word[2], word[3]])
                });
                assert_eq!(lanes, expected, "rows from {at}, word {i}");
                found.push((format!("load_rows {at} {i}"), lanes));
            }
        }
    }

    /// Products of bytes, up to the ends of what 16 bits have to hold.
    #[inline(always)]
    fn of_narrow_products<S: ByteProducts>(s: S, found: &mut Found) {
        for (seed, bits) in (0..40).flat_map(|seed| (2..=6).map(move |bits| (seed, bits))) {
            let total = ints(s, around(&[0, 1, -77, 1 << 20, -(1 << 20)], seed, 1));
            // Weights at their largest, whose products with one sign throughout add up most.
            let full = seed % 4 == 0;
            let mask = (1u8 << bits) - 1;
            let weights = |seed| bytes::<64>(seed).map(|b| if full { mask } else { b & mask });
            let mut sums = s.no_products();
            for i in 0..128 >> bits {
                let x = activation(if full { seed / 4 % 2 } else { seed + i });
                sums = s.narrow(sums, load(s, weights(seed + i)), x);
            }
            let sum = lanes_of(s, s.collect(sums, total));
            found.push((format!("narrow {seed} {bits}"), sum));
            let pairs = bytes::<32>(seed + 9).map(|b| b as i8);
            // SAFETY: thirty-two bytes.
            let pairs = unsafe { s.load_pairs(pairs.as_ptr()) };
            for factor in [s.factor::<0>(pairs), s.factor::<1>(pairs)] {
                // No format has sixteen numbers with a scale and fewer than eight products in 16 bits.
                let few = s.narrow(s.no_products(), load(s, weights(seed)), activation(seed));
                let sum = lanes_of(s, s.collect_scaled(few, factor, total));
                found.push((format!("collect_scaled {seed} {bits}"), sum));
            }
            let moved = s.shl_pairs(pairs, bits);
            found.push((format!("shl_pairs {seed} {bits}"), lanes_of(s, moved)));
            let dot = s.dot_pairs(moved, s.splat_i(activation(seed + 3)));
            found.push((format!("dot_pairs {seed} {bits}"), lanes_of(s, dot)));
        }
    }

    #[inline(always)]
    fn of_wide_products<S: ByteProducts>(s: S, found: &mut Found) {
        for seed in 0..40 {
            let x = activation(seed);
            let sum: i32 = x.to_le_bytes().map(|b| i32::from(b as i8)).iter().sum();
            let above = if S::WIDE_FLIP == 0 { 0 } else { 128 * sum };
            for w in [bytes(seed), [0x80; 64], [0x7f; 64], [0; 64]] {
                let w = load(s, w.map(|b: u8| b ^ S::WIDE_FLIP));
                let total = s.wide(s.splat_i(77 - above), w, x);
                found.push((format!("wide {seed}"), lanes_of(s, total)));
            }
        }
    }
}

#[inline(always)]
fn load<S: Simd>(s: S, bytes: [u8; 64]) -> S::I {
    // SAFETY: sixty-four bytes.
    unsafe { s.load_i(bytes.as_ptr()) }
}

#[inline(always)]
fn ints<S: Simd>(s: S, lanes: [i32; LANES]) -> S::I {
    load(s, bytemuck::cast(lanes))
}

#[inline(always)]
fn lanes_of<S: Simd>(s: S, v: S::I) -> Vec<u32> {
    let mut out = [0u32; LANES];
    // SAFETY: sixty-four bytes.
    unsafe { s.store_i(out.as_mut_ptr().cast(), v) };
    out.to_vec()
}

impl ByteKernel for Everything {
    type Output = Found;

    #[inline(always)]
    fn run<S: ByteProducts>(self, s: S) -> Found {
        let mut found = Vec::new();
        Self::of_floats(s, &mut found);
        Self::of_magic(s, &mut found);
        Self::of_small_floats(s, &mut found);
        Self::of_integers(s, &mut found);
        Self::of_rows(s, &mut found);
        Self::of_narrow_products(s, &mut found);
        Self::of_wide_products(s, &mut found);
        found
    }
}

#[test]
fn every_operation_means_the_same_at_every_level() {
    let expected = Everything.run(Scalar);
    for isa in available(Isa::ALL, Isa::is_available) {
        let found = Level::new(isa).unwrap().run_bytes(Everything);
        assert_eq!(found.len(), expected.len());
        for ((name, found), (_, expected)) in found.iter().zip(&expected) {
            assert_eq!(found, expected, "{}: {name}", isa.name());
        }
    }
}

/// Pairs of bf16, and what their products are in f64.
struct PairProducts(Vec<[f32; LANES]>);

impl Kernel for PairProducts {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Vec<f32> {
        let mut sum = s.zero();
        for pairs in self.0.chunks(2) {
            sum = s.dot_bf16(s.lanes(pairs[0]), s.lanes(pairs[1]), sum);
        }
        s.to_array(sum).to_vec()
    }
}

#[test]
fn products_of_pairs_are_those_of_both_halves() {
    let number = |i: usize| bf16::from_f32(((i * 7919 % 1013) as f32 - 506.0) / 64.0);
    let pair = |low: bf16, high: bf16| {
        f32::from_bits(u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16)
    };
    let mut pairs = Vec::new();
    let mut expected = [0.0f64; LANES];
    for step in 0..40 {
        let (mut a, mut b) = ([0.0; LANES], [0.0; LANES]);
        for lane in 0..LANES {
            let of = |k: usize| number((step * LANES + lane) * 4 + k);
            (a[lane], b[lane]) = (pair(of(0), of(1)), pair(of(2), of(3)));
            let product = |a: bf16, b: bf16| a.to_f64() * b.to_f64();
            expected[lane] += product(of(0), of(2)) + product(of(1), of(3));
        }
        pairs.extend([a, b]);
    }
    for isa in available(Isa::ALL, Isa::is_available) {
        let level = Level::new(isa).unwrap();
        let found = level.run_bf16(PairProducts(pairs.clone()));
        for (found, expected) in found.iter().zip(expected) {
            let error = (f64::from(*found) - expected).abs();
            assert!(
                error <= 1e-3,
                "{}: {found}, expected {expected}",
                isa.name()
            );
        }
    }
}
