//! The checks by themselves: sizes at the edge of the address space, and batches that contradict
//! themselves. That each op calls its own check is what conformance shows.

use super::*;
use crate::backend::{BatchShape, KvF32, KvInt8, PagedKvShape};
use crate::reference::ReferenceBackend as R;
use crate::{Backend, HeadsShape, QkvShape};

fn refused<T: std::fmt::Debug>(what: &str, result: Result<T>) {
    let invalid = matches!(result, Err(Error::InvalidArgument { .. }));
    assert!(invalid, "{what}: {result:?}");
}

#[test]
fn elements_multiply_without_overflow() {
    let half = usize::MAX / 2 + 1;
    assert_eq!(elements("op", &[]), Ok(1));
    assert_eq!(elements("op", &[2, 3, 5]), Ok(30));
    assert_eq!(elements("op", &[usize::MAX, 1]), Ok(usize::MAX));
    assert_eq!(elements("op", &[0, usize::MAX]), Ok(0));
    refused("too many", elements("op", &[half, 2]));
    refused("strides too large", elements("op", &[0, half, 2]));
}

#[test]
fn a_range_ends_in_its_buffer() {
    let buffer = R::new().alloc::<f32>(5).unwrap();
    assert_eq!(range("op", "x", &buffer, 2, 3), Ok(2..5));
    assert_eq!(range("op", "x", &buffer, 5, 0), Ok(5..5));
    assert!(matches!(
        range("op", "x", &buffer, 3, 3),
        Err(Error::Shape {
            found: 5,
            expected: 6,
            ..
        })
    ));
    refused("overflow", range("op", "x", &buffer, usize::MAX, 1));
}

#[test]
fn indices_are_below_their_count() {
    assert_eq!(index("op", "a row", 2, 3), Ok(2));
    for id in [3, -1, i32::MIN, i32::MAX] {
        refused("outside", index("op", "a row", id, 3));
    }
}

/// Also where there is no token, since a backend computes with the length of a row.
#[test]
fn a_row_of_a_projection_is_a_size() {
    let x = R::new().alloc::<f32>(0).unwrap();
    let transform = crate::QkvTransform {
        q_norm: None,
        k_norm: None,
        rope: None,
    };
    let shape = QkvShape {
        tokens: 0,
        heads: 1 << 62,
        kv_heads: 1 << 61,
        head_dim: 2,
        value_dim: 2,
    };
    let result = split_qkv::<R>("split_qkv", &x, [&x; 3], transform, shape);
    refused("a row of 2^64 elements", result.map(|lens| lens.qkv));
    let shape = HeadsShape {
        tokens: 0,
        heads: usize::MAX,
        head_dim: 2,
    };
    refused("strides", transpose("transpose", &x, &x, shape));
}

#[test]
fn a_pool_has_scales_where_its_element_does() {
    let shape = PagedKvShape {
        blocks: 2,
        block_size: 4,
        kv_heads: 3,
        head_dim: 5,
        value_dim: 5,
        values_in_keys: false,
    };
    assert!(kv_pool::<KvF32>("op", &shape, [120; 2], [0; 2]).is_ok());
    assert!(kv_pool::<KvInt8>("op", &shape, [120; 2], [24; 2]).is_ok());
    assert!(kv_pool::<KvInt8>("op", &shape, [120; 2], [24, 23]).is_err());
    assert!(kv_pool::<KvF32>("op", &shape, [120, 119], [0; 2]).is_err());
}

const SHAPE: BatchShape = BatchShape {
    tokens: 3,
    seqs: 2,
    table_stride: 2,
    max_query_len: 2,
    max_kv_len: 9,
};

fn sequences(starts: &[i32], kv_lens: &[i32]) -> Result<Vec<Sequence>> {
    let batch = Batch::new("op", SHAPE, [starts, kv_lens, &[0; 4]])?;
    (0..SHAPE.seqs).map(|s| batch.sequence("op", s)).collect()
}

#[test]
fn sequences_make_up_the_batch() {
    let found = sequences(&[0, 2, 3], &[5, 1]).unwrap();
    let expected = [(0..2, 3, 5), (2..3, 0, 1)].map(|(tokens, first_index, kv_len)| Sequence {
        tokens,
        first_index,
        kv_len,
    });
    assert_eq!(found, expected);
    for (what, starts, kv_lens) in [
        ("begins late", [1, 2, 3], [5, 1]),
        ("ends early", [0, 1, 2], [5, 1]),
        ("decreases", [0, -1, 3], [5, 1]),
        ("beyond the tokens", [0, 4, 3], [5, 1]),
        ("fewer keys than tokens", [0, 2, 3], [1, 1]),
        ("negative keys", [0, 2, 3], [-5, 1]),
        ("more tokens than announced", [0, 3, 3], [5, 0]),
        ("more keys than announced", [0, 2, 3], [10, 1]),
    ] {
        refused(what, sequences(&starts, &kv_lens));
    }
}

#[test]
fn a_key_has_a_block_of_the_pool() {
    let shape = PagedKvShape {
        blocks: 4,
        block_size: 3,
        kv_heads: 1,
        head_dim: 1,
        value_dim: 1,
        values_in_keys: false,
    };
    assert_eq!(block_and_slot("op", &[2, 0], &shape, 4), Ok((0, 1)));
    refused("past the table", block_and_slot("op", &[2, 0], &shape, 6));
    refused("no such block", block_and_slot("op", &[4, 0], &shape, 2));
    refused(
        "a negative block",
        block_and_slot("op", &[-1, 0], &shape, 2),
    );
}
