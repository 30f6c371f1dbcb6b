//! Blocks as bytes: read, written elsewhere, attended over; and what is refused.

use super::step::{BASE, FEW, Layout, Paged, Spec, WHOLE, make, step};
use super::{append_and_attend, attend, attention, attention_formula, tolerance};
use crate::case::{Cases, both, implementations, label};
use crate::data::Rng;
use crate::io::{Check, Fault, Io, Refusals, wrong};
use ferrum_kernels::reference::ReferenceBackend;
use ferrum_kernels::{BackendKvDtype, KvDtypeKind, KvLayer, PagedKvShape};
use ferrum_types::{BlockId, Error};

/// The bytes of some blocks of a pool.
fn read<B: BackendKvDtype<K>, K: KvDtypeKind>(
    ctx: &mut B::Context,
    kv: &KvLayer<B, K>,
    blocks: &[BlockId],
) -> Check<Vec<Vec<u8>>> {
    let size = kv.shape.block_bytes::<K>().map_or(0, |parts| parts.len());
    let mut bytes = vec![vec![0xa5; size]; blocks.len()];
    let slices = bytes.iter_mut().map(Vec::as_mut_slice);
    let mut wanted: Vec<_> = blocks.iter().copied().zip(slices).collect();
    B::kv_read_blocks(ctx, kv, &mut wanted)?;
    Ok(bytes)
}

fn write<B: BackendKvDtype<K>, K: KvDtypeKind>(
    ctx: &mut B::Context,
    kv: &mut KvLayer<B, K>,
    blocks: &[BlockId],
    bytes: &[Vec<u8>],
) -> Check {
    let slices = bytes.iter().map(Vec::as_slice);
    let blocks: Vec<_> = blocks.iter().copied().zip(slices).collect();
    Ok(B::kv_write_blocks(ctx, kv, &blocks)?)
}

/// The blocks of all sequences.
fn used(layout: &Layout) -> Vec<BlockId> {
    let ids = layout.tables.iter().flatten();
    ids.map(|&id| BlockId(id as u32)).collect()
}

/// Moves the blocks of all sequences to another pool, to other places, and attends there.
fn moved<B: BackendKvDtype<K>, K: KvDtypeKind>(io: &mut Io<'_, B>, data: &Paged) -> Check {
    let mut layout = Layout::new(data);
    let kv = layout.pool::<B, K>(io.device, data)?;
    let from = used(&layout);
    let bytes = read(&mut io.ctx, &kv, &from)?;
    drop(kv);
    // Far enough that no block keeps its number.
    let shift = layout.pool.blocks + 2;
    layout.pool.blocks += shift;
    let mut other: KvLayer<B, K> = io.device.alloc_kv_layer(layout.pool)?;
    other.group = layout.group;
    for block in layout.tables.iter_mut().flatten() {
        *block += shift as i32;
    }
    write(&mut io.ctx, &mut other, &used(&layout), &bytes)?;
    append_and_attend(io, data, &layout, &mut other)
}

/// Attends over blocks whose bytes the reference made: they mean the same everywhere.
fn from_reference<B, K>(io: &mut Io<'_, B>, data: &Paged) -> Check
where
    B: BackendKvDtype<K>,
    K: KvDtypeKind,
    ReferenceBackend: BackendKvDtype<K>,
{
    let layout = Layout::new(data);
    let mut made = layout.pool::<ReferenceBackend, K>(&ReferenceBackend::new(), data)?;
    let [_, k, v] = &data.step_qkv;
    let new = [k.clone(), v.clone()];
    layout.append(&ReferenceBackend::new(), &mut made, &step(data), &new)?;
    let device = ReferenceBackend::new();
    let mut reference = Io::new(&device, Fault::None)?;
    let blocks = used(&layout);
    let bytes = read::<ReferenceBackend, K>(&mut reference.ctx, &made, &blocks)?;
    let mut kv: KvLayer<B, K> = io.device.alloc_kv_layer(layout.pool)?;
    kv.group = layout.group;
    write(&mut io.ctx, &mut kv, &blocks, &bytes)?;
    let batch = layout.batch::<B, K>(io, &step(data), data.spec.slack)?;
    attend(io, data, &batch, &kv)
}

/// Whatever is written is read back, in whichever order, and other blocks stay as they were.
fn kept<B: BackendKvDtype<K>, K: KvDtypeKind>(device: &B) -> Check {
    for (block_size, kv_heads, head_dim, value_dim, values_in_keys) in [
        (32, 2, 64, 64, false),
        (7, 3, 9, 9, false),
        (1, 1, 1, 1, false),
        (20, 2, 16, 16, false),
        (7, 2, 9, 14, false),
        (16, 2, 24, 5, false),
        (16, 1, 36, 32, true),
        (5, 1, 9, 9, true),
    ] {
        let shape = PagedKvShape {
            blocks: 4,
            block_size,
            kv_heads,
            head_dim,
            value_dim,
            values_in_keys,
        };
        let mut io = Io::new(device, Fault::None)?;
        let mut kv: KvLayer<B, K> = device.alloc_kv_layer(shape)?;
        let size = shape.block_bytes::<K>().map_or(0, |parts| parts.len());
        let whole = shape.bytes::<K>().map(|bytes| bytes / shape.blocks);
        if whole != Some(size) {
            return wrong(format!(
                "{shape:?} has blocks of {size} bytes, not {whole:?}"
            ));
        }
        let mut rng = Rng::new("bytes of blocks", |x| x);
        let noise = rng.floats(3 * size, 1.0);
        let noise: Vec<u8> = noise.iter().map(|x| x.to_bits() as u8).collect();
        let bytes: Vec<_> = noise.chunks_exact(size).map(<[u8]>::to_vec).collect();
        // The last of two writes to a block counts.
        let order = [3, 1, 3].map(BlockId);
        write(&mut io.ctx, &mut kv, &order, &bytes)?;
        let found = read(&mut io.ctx, &kv, &[0, 1, 2, 3, 1].map(BlockId))?;
        let zeros = vec![0; size];
        let expected = [&zeros, &bytes[1], &zeros, &bytes[2], &bytes[1]];
        for (block, (found, expected)) in found.iter().zip(expected).enumerate() {
            if found != expected {
                return wrong(format!(
                    "entry {block} of {shape:?} is not what was written"
                ));
            }
        }
    }
    Ok(())
}

/// Blocks that are not in the pool, and bytes of another length; nothing is written then.
fn refusals<B: BackendKvDtype<K>, K: KvDtypeKind>(device: &B, refused: &mut Refusals) -> Check {
    let shape = super::refusals::SMALL;
    let mut io = Io::new(device, Fault::None)?;
    let mut kv: KvLayer<B, K> = device.alloc_kv_layer(shape)?;
    let size = shape.block_bytes::<K>().map_or(0, |parts| parts.len());
    let right = vec![1u8; size];
    let wrong_ones = [
        (3, size),
        (u32::MAX, size),
        (0, size - 1),
        (0, size + 1),
        (0, 0),
    ];
    for (block, len) in wrong_ones {
        let bytes = vec![1; len];
        let blocks = [(BlockId(1), &right[..]), (BlockId(block), &bytes[..])];
        let what = format!("{len} bytes for block {block} of 3");
        let done = B::kv_write_blocks(&mut io.ctx, &mut kv, &blocks);
        if len != size && !matches!(done, Err(Error::Shape { .. })) {
            return wrong(format!("{what} gave no shape error"));
        }
        refused.expect(&what, done)?;
        let (mut out, mut first) = (bytes.clone(), right.clone());
        let mut blocks = [(BlockId(1), &mut first[..]), (BlockId(block), &mut out[..])];
        let done = B::kv_read_blocks(&mut io.ctx, &kv, &mut blocks);
        refused.expect(&what, done)?;
        if first != right {
            return wrong("a read that was refused wrote something");
        }
    }
    if read(&mut io.ctx, &kv, &[BlockId(1)])? != [vec![0; size]] {
        return wrong("a write that was refused wrote something");
    }
    read(&mut io.ctx, &kv, &[])?;
    write(&mut io.ctx, &mut kv, &[], &[])
}

pub(super) fn cases<B, K>(cases: &mut Cases<B>)
where
    B: BackendKvDtype<K>,
    K: KvDtypeKind,
    ReferenceBackend: BackendKvDtype<K>,
{
    let op = "kv_write_blocks";
    let specs = [
        ("ragged batch", BASE),
        (
            "blocks of 7, head_dim 10",
            Spec {
                block_size: 7,
                head_dim: 10,
                ..FEW
            },
        ),
        (
            "blocks of 32, head_dim 64",
            Spec {
                block_size: 32,
                head_dim: 64,
                ..FEW
            },
        ),
        (
            "contiguous",
            Spec {
                block_size: WHOLE,
                ..FEW
            },
        ),
        (
            "keys of 9, values of 20",
            Spec {
                head_dim: 9,
                value_dim: 20,
                ..FEW
            },
        ),
        (
            "latent rows of 33, values of 24, blocks of 20",
            Spec {
                heads: (4, 1),
                head_dim: 33,
                value_dim: 24,
                latent: true,
                block_size: 20,
                ..FEW
            },
        ),
    ];
    for (text, spec) in specs {
        let make = move |rng: &mut Rng| make(rng, spec);
        let name = format!("{text}, attention over moved blocks");
        cases.same((op, K::NAME, &name), make, attention::<B, K>, moved::<B, K>);
        let name = format!("{text}, blocks of the reference");
        let case = label(op, K::NAME, tolerance::<B, K>(), name);
        cases.add(
            case,
            make,
            implementations!(from_reference, K, attention_formula::<K>),
        );
    }
    cases.check((op, K::NAME, "what is written is read"), kept::<B, K>);
    cases.refuses(
        (op, K::NAME, "blocks and lengths that do not fit"),
        both!(refusals, K),
    );
}
