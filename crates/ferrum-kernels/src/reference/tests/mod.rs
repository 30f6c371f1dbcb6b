//! Hand-computed values and identities between ops, through the contract only.

mod attention;
mod caches;
mod conv;
mod core;
mod dense;
mod elementwise;
mod heads;
mod kv;
mod moe;
mod quant;

use super::{RefBuffer, RefContext, ReferenceBackend as R, Uniform};
use crate::backend::*;
use ferrum_types::{Error, GgufQuantType};

fn ctx() -> RefContext<Uniform<f32>> {
    R::new()
        .new_context()
        .expect("the reference device always opens")
}

fn buf(data: &[f32]) -> RefBuffer<f32> {
    RefBuffer(data.to_vec())
}

fn ints(data: &[i32]) -> RefBuffer<i32> {
    RefBuffer(data.to_vec())
}

/// An output that no op leaves as it is.
fn poisoned(len: usize) -> RefBuffer<f32> {
    RefBuffer(vec![f32::NAN; len])
}

/// Repeatable numbers in -1..1.
fn noise(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(len).collect()
}

fn noise_buf(seed: u64, len: usize) -> RefBuffer<f32> {
    RefBuffer(noise(seed, len))
}

#[track_caller]
fn assert_close(what: &str, found: &RefBuffer<f32>, expected: &[f32]) {
    assert_eq!(found.0.len(), expected.len(), "{what}: length");
    for (i, (&found, &expected)) in found.0.iter().zip(expected).enumerate() {
        let close = (found - expected).abs() <= 1e-6 * expected.abs().max(1.0);
        assert!(close, "{what}[{i}] is {found}, expected {expected}");
    }
}

#[track_caller]
fn assert_invalid<T>(what: &str, result: ferrum_types::Result<T>) {
    match result {
        Err(Error::InvalidArgument { .. }) => {}
        Err(other) => panic!("{what}: expected an invalid argument, got: {other}"),
        Ok(_) => panic!("{what}: expected an invalid argument, got a result"),
    }
}

#[track_caller]
fn assert_short<T>(what: &str, result: ferrum_types::Result<T>) {
    match result {
        Err(Error::Shape { .. }) => {}
        Err(other) => panic!("{what}: expected a shape error, got: {other}"),
        Ok(_) => panic!("{what}: expected a shape error, got a result"),
    }
}

/// Random blocks of any type: no byte is above 0x3b, so that every stored float is finite.
fn blocks(ty: GgufQuantType, count: usize, seed: u64) -> Vec<u8> {
    let bytes = ty.bytes_for(count).expect("tests use whole blocks");
    noise(seed, bytes)
        .iter()
        .map(|x| (x.to_bits() >> 8) as u8 & 0x3b)
        .collect()
}
