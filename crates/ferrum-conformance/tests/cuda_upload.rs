//! Weights of several pieces, which threads fill and upload beside each other through pinned memory, under the stand-in driver of
//! `tools/cuda-emulator`: the cases of the suite are all smaller than one piece. The driver copies as late as it may, so pinned memory that is
//! used again too early gives other numbers.

use ferrum_kernels::cuda::CudaBackend;
use ferrum_kernels::{Backend, BackendQuantGguf, GgufRows, ReferenceBackend, RowShape, WeightPart};
use ferrum_test_support::skip;
use ferrum_types::{GgufQuantType, SrcDtype};
use half::{bf16, f16};

/// Bytes of a piece in `cuda/context.rs`.
const PIECE: usize = 1 << 20;

/// Rows of a tile of packed weights, which one thread fills.
const TILE_ROWS: usize = 16;

/// Bytes of a tile of Q4_K in `cuda/pack.rs`, 16 rows of one block.
const TILE_BYTES: usize = TILE_ROWS * (128 + 8 * 2 + 8);

fn opened() -> Option<CudaBackend<bf16>> {
    if let Err(reason) = ferrum_cuda_emulator::load() {
        skip(reason);
        return None;
    }
    Some(CudaBackend::open(0).expect("the emulator opens"))
}

/// Bytes that are others in each row.
fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(|_| next()).collect();
    bytes.truncate(len);
    bytes
}

/// Blocks of Q4_K with scales of a moderate size.
fn blocks(count: usize, seed: u64) -> Vec<u8> {
    let size = GgufQuantType::Q4_K.block_bytes();
    let mut bytes = bytes(count * size, seed);
    for block in bytes.chunks_exact_mut(size) {
        for (at, scale) in [(0, 0.01), (2, 0.02)] {
            block[at..at + 2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
        }
    }
    bytes
}

/// Numbers of bf16 between 1 and 2, or their negatives: no row has a NaN.
fn halves(count: usize, seed: u64) -> Vec<u8> {
    let mut bytes = bytes(2 * count, seed);
    for half in bytes.chunks_exact_mut(2) {
        half[0] = (half[0] & 0x7f) | 0x80;
        half[1] = (half[1] & 0x80) | 0x3f;
    }
    bytes
}

/// The first and last rows, those on both sides of each border between pieces, and some in between.
fn ids(rows: usize, rows_of_piece: usize) -> Vec<i32> {
    let borders = (rows_of_piece..rows).step_by(rows_of_piece);
    let mut ids: Vec<_> = borders.flat_map(|border| [border - 1, border]).collect();
    ids.extend([0, rows - 1]);
    ids.extend((0..rows).step_by(rows.div_ceil(16) + 1));
    ids.sort_unstable();
    ids.dedup();
    ids.into_iter().map(|id| id as i32).collect()
}

/// Rows of a table, which `load` and `lookup` make on any backend.
fn quantised_rows<B: BackendQuantGguf>(
    device: &B,
    parts: &[GgufRows<'_>],
    ids: &[i32],
    dim: usize,
) -> Vec<B::Residual> {
    let rows = ids.len();
    let table = device.load_quant_fused(parts, dim).expect("it loads");
    let mut ctx = device.new_context().expect("a context");
    let ids = device.from_slice(ids).expect("room");
    let mut out = device.alloc(rows * dim).expect("room");
    let shape = RowShape { rows, dim };
    B::embedding_lookup_quant(&mut ctx, &table, &ids, &mut out, shape).expect("it runs");
    B::to_vec(&mut ctx, &out).expect("they are read")
}

fn dense_rows<B: Backend>(
    device: &B,
    parts: &[WeightPart<'_>],
    ids: &[i32],
    dim: usize,
) -> Vec<B::Residual> {
    let rows = ids.len();
    let table = device.from_table_parts(parts, dim).expect("it loads");
    let mut ctx = device.new_context().expect("a context");
    let ids = device.from_slice(ids).expect("room");
    let mut out = device.alloc(rows * dim).expect("room");
    let shape = RowShape { rows, dim };
    B::embedding_lookup(&mut ctx, &table, &ids, &mut out, shape).expect("it runs");
    B::to_vec(&mut ctx, &out).expect("they are read")
}

/// Compares rows: a number is a code times a scale and a minimum, so what is rounded differs by an ulp of the larger of both.
fn check(what: &str, ids: &[i32], dim: usize, (found, expected): (&[f32], &[f32])) {
    assert_eq!(found.len(), ids.len() * dim, "{what}");
    let wrong = |(found, expected): (&[f32], &[f32])| {
        let pairs = found.iter().zip(expected);
        let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5;
        !pairs.clone().all(near)
    };
    let rows = found.chunks(dim).zip(expected.chunks(dim));
    let wrong: Vec<_> = ids
        .iter()
        .zip(rows)
        .filter(|(_, row)| wrong(*row))
        .collect();
    let wrong: Vec<_> = wrong.iter().map(|(id, _)| **id).collect();
    assert!(wrong.is_empty(), "{what}: rows {wrong:?} differ");
}

fn check_quantised(device: &CudaBackend<bf16>, parts: [usize; 2], blocks_of_row: usize) {
    let dim = blocks_of_row * GgufQuantType::Q4_K.block_len();
    let files =
        [(parts[0], 1), (parts[1], 2)].map(|(rows, seed)| blocks(rows * blocks_of_row, seed));
    let parts: Vec<_> = (files.iter().zip(parts))
        .map(|(bytes, rows)| GgufRows::new(bytes, GgufQuantType::Q4_K, rows))
        .collect();
    let rows: usize = parts.iter().map(|part| part.rows).sum();
    let of_piece = (PIECE / (blocks_of_row * TILE_BYTES)).max(1) * TILE_ROWS;
    assert!(rows > 2 * of_piece, "three pieces or more");
    let ids = ids(rows, of_piece);
    let found = quantised_rows(device, &parts, &ids, dim);
    let expected = quantised_rows(&ReferenceBackend::new(), &parts, &ids, dim);
    let what = format!("Q4_K [{rows}, {dim}]");
    check(&what, &ids, dim, (&found, &expected));
}

fn check_dense(device: &CudaBackend<bf16>, parts: [usize; 2], dim: usize) {
    let files = [(parts[0], 3), (parts[1], 4)].map(|(rows, seed)| halves(rows * dim, seed));
    let parts: Vec<_> = (files.iter().zip(parts))
        .map(|(bytes, rows)| WeightPart::new(bytes, SrcDtype::BF16, rows))
        .collect();
    let rows: usize = parts.iter().map(|part| part.rows).sum();
    // Each part is uploaded by itself.
    let of_piece = (PIECE / (2 * dim.next_multiple_of(8))).max(1);
    let of_parts = ids(parts[0].rows, of_piece).into_iter();
    let behind = ids(parts[1].rows, of_piece).into_iter();
    let ids: Vec<_> = of_parts
        .chain(behind.map(|id| id + parts[0].rows as i32))
        .collect();
    let found = dense_rows(device, &parts, &ids, dim);
    let expected = dense_rows(&ReferenceBackend::new(), &parts, &ids, dim);
    let what = format!("bf16 [{rows}, {dim}]");
    check(&what, &ids, dim, (&found, &expected));
}

/// Three pieces of whole tiles, of which one has rows of both parts; and tiles of one row of blocks that are each more than a
/// piece.
#[test]
fn packed_weights_of_several_pieces() {
    if let Some(device) = opened() {
        check_quantised(&device, [7000, 8003], 1);
        check_quantised(&device, [20, 17], PIECE / TILE_BYTES + 1);
    }
}

/// More pieces than there is pinned memory for at once, with numbers behind each row that the file does not have; and rows that are
/// each more than a piece.
#[test]
fn dense_weights_of_several_pieces() {
    if let Some(device) = opened() {
        check_dense(&device, [3000, 5500], 1236);
        check_dense(&device, [1, 2], PIECE / 2 + 9);
    }
}

/// Copies of more bytes than go at once, more of them than there is pinned memory of that size for.
#[test]
fn buffers_of_several_steps() {
    let Some(device) = opened() else {
        return;
    };
    let numbers: Vec<i32> = (0..9 << 20).collect();
    let buffer = device.from_slice(&numbers).expect("room");
    let mut ctx = device.new_context().expect("a context");
    let found = CudaBackend::to_vec(&mut ctx, &buffer).expect("it is read");
    assert!(found == numbers);
}
