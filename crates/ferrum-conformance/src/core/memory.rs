//! Buffers: every element type, odd offsets, and nothing beyond what was asked for.

use crate::case::{Cases, both};
use crate::io::{CaseError, Check, Refusals, wrong};
use ferrum_kernels::{Backend, CopyColumnsShape, DeviceBuffer, UploadPiece};
use ferrum_types::{Element, Error};
use half::{bf16, f16};

/// Elements made from numbers, for buffers of any type.
trait Sample: Element {
    fn sample(i: usize) -> Self;
}

macro_rules! samples {
    ($($t:ty => $from:expr),* $(,)?) => {$(
        impl Sample for $t {
            fn sample(i: usize) -> Self {
                $from(i)
            }
        }
    )*};
}
samples!(
    f32 => |i| i as f32 * 0.25 - 3.0,
    f16 => |i| f16::from_f32(i as f32 * 0.25 - 3.0),
    bf16 => |i| bf16::from_f32(i as f32 * 0.25 - 3.0),
    i32 => |i| i as i32 * 70_001 - 5,
    u32 => |i| i as u32 * 70_001 + 5,
    i8 => |i| (i * 7 + 3) as i8,
    u8 => |i| (i * 7 + 3) as u8,
);

fn samples<T: Sample>(from: usize, len: usize) -> Vec<T> {
    (from..from + len).map(T::sample).collect()
}

fn expect<T: Element>(what: &str, found: &[T], expected: &[T]) -> Check {
    if found.len() != expected.len() {
        let (found, expected) = (found.len(), expected.len());
        return wrong(format!("{what} has {found} elements, expected {expected}"));
    }
    match found.iter().zip(expected).position(|(a, b)| a != b) {
        Some(i) => wrong(format!(
            "{what}[{i}] is {:?}, expected {:?}",
            found[i], expected[i]
        )),
        None => Ok(()),
    }
}

fn alloc<B: Backend, T: Sample>(device: &B) -> Check {
    let mut ctx = device.new_context()?;
    for len in [0, 1, 3, 257, 5000] {
        let buffer = device.alloc::<T>(len)?;
        if buffer.len() != len || buffer.is_empty() != (len == 0) {
            return wrong(format!(
                "a buffer of {len} says that it has {}",
                buffer.len()
            ));
        }
        expect(
            "alloc",
            &B::to_vec(&mut ctx, &buffer)?,
            &vec![T::zeroed(); len],
        )?;
    }
    Ok(())
}

fn from_slice<B: Backend, T: Sample>(device: &B) -> Check {
    let mut ctx = device.new_context()?;
    for len in [0, 1, 2, 3, 5, 31, 257, 5000] {
        let data = samples::<T>(1, len);
        let buffer = device.from_slice(&data)?;
        expect("from_slice", &B::to_vec(&mut ctx, &buffer)?, &data)?;
    }
    Ok(())
}

/// `(offset, len)` inside 100 elements, of every remainder by 4.
const SPANS: &[(usize, usize)] = &[
    (0, 100),
    (0, 0),
    (0, 1),
    (99, 1),
    (100, 0),
    (1, 7),
    (2, 31),
    (3, 64),
    (4, 4),
    (5, 1),
    (63, 33),
];

fn write<B: Backend, T: Sample>(device: &B, refused: &mut Refusals) -> Check {
    let mut ctx = device.new_context()?;
    for &(offset, len) in SPANS {
        let mut expected = samples::<T>(0, 100);
        let mut buffer = device.from_slice(&expected)?;
        let data = samples::<T>(200, len);
        expected[offset..offset + len].copy_from_slice(&data);
        B::write(&mut ctx, &mut buffer, offset, &data)?;
        let what = format!("write of {len} at {offset}: dst");
        expect(&what, &B::to_vec(&mut ctx, &buffer)?, &expected)?;
        for (offset, len) in [(94, 7), (101, 0), (101, 1), (usize::MAX, 2)] {
            let result = B::write(&mut ctx, &mut buffer, offset, &samples::<T>(7, len));
            refused.expect(&format!("write of {len} at {offset} to 100"), result)?;
        }
    }
    Ok(())
}

fn read<B: Backend, T: Sample>(device: &B, refused: &mut Refusals) -> Check {
    let mut ctx = device.new_context()?;
    let data = samples::<T>(0, 100);
    let buffer = device.from_slice(&data)?;
    for &(offset, len) in SPANS {
        let mut out = samples::<T>(500, len);
        B::read(&mut ctx, &buffer, offset, &mut out)?;
        let what = format!("read of {len} at {offset}: out");
        expect(&what, &out, &data[offset..offset + len])?;
    }
    for (offset, len) in [(94, 7), (101, 0), (101, 1), (usize::MAX, 2)] {
        let mut out = samples::<T>(500, len);
        let result = B::read(&mut ctx, &buffer, offset, &mut out);
        refused.expect(&format!("read of {len} at {offset} from 100"), result)?;
    }
    Ok(())
}

/// Several reads at once, finished in any order: each has what was there when it was begun.
fn begin_read<B: Backend, T: Sample>(device: &B, refused: &mut Refusals) -> Check {
    let mut ctx = device.new_context()?;
    let data = samples::<T>(0, 100);
    let mut buffer = device.from_slice(&data)?;
    let mut begun = Vec::new();
    for &(offset, len) in SPANS {
        begun.push(B::begin_read(&mut ctx, &buffer, offset, len)?);
    }
    B::write(&mut ctx, &mut buffer, 0, &samples::<T>(300, 100))?;
    let later = B::begin_read(&mut ctx, &buffer, 0, 100)?;
    drop(B::begin_read(&mut ctx, &buffer, 0, 100)?);
    let mut out = samples::<T>(500, 100);
    later.finish(&mut out)?;
    expect("the later read: out", &out, &samples::<T>(300, 100))?;
    for (&(offset, len), read) in SPANS.iter().zip(begun).rev() {
        let mut out = samples::<T>(500, len);
        read.finish(&mut out)?;
        let what = format!("begun read of {len} at {offset}: out");
        expect(&what, &out, &data[offset..offset + len])?;
    }
    for (offset, len) in [(94, 7), (101, 1), (usize::MAX, 2)] {
        let result = B::begin_read(&mut ctx, &buffer, offset, len);
        refused.expect(&format!("begin_read of {len} at {offset} from 100"), result)?;
    }
    let read = B::begin_read(&mut ctx, &buffer, 0, 7)?;
    let result = read.finish(&mut samples::<T>(0, 8));
    refused.expect("the end of a read of 7 into 8", result)
}

fn copy_slice<B: Backend, T: Sample>(device: &B, refused: &mut Refusals) -> Check {
    let mut ctx = device.new_context()?;
    let data = samples::<T>(300, 100);
    let src = device.from_slice(&data)?;
    for &(offset, len) in SPANS {
        for dst_offset in [0, 1, 6, 11] {
            let mut expected = samples::<T>(0, 120);
            let mut dst = device.from_slice(&expected)?;
            expected[dst_offset..dst_offset + len].copy_from_slice(&data[offset..offset + len]);
            B::copy_slice(&mut ctx, &src, offset, &mut dst, dst_offset, len)?;
            let what = format!("copy of {len} from {offset} to {dst_offset}: dst");
            expect(&what, &B::to_vec(&mut ctx, &dst)?, &expected)?;
        }
    }
    let mut dst = device.from_slice(&samples::<T>(0, 120))?;
    for (from, to, len) in [(94, 0, 7), (0, 114, 7), (101, 0, 1), (usize::MAX, 0, 2)] {
        let result = B::copy_slice(&mut ctx, &src, from, &mut dst, to, len);
        refused.expect(&format!("copy of {len} from {from} to {to}"), result)?;
    }
    Ok(())
}

fn copy_columns<B: Backend, T: Sample>(device: &B, refused: &mut Refusals) -> Check {
    let mut ctx = device.new_context()?;
    let data = samples::<T>(300, 600);
    let src = device.from_slice(&data)?;
    let shape = |rows, len, src, dst| {
        let ((src_first, src_width), (dst_first, dst_width)) = (src, dst);
        CopyColumnsShape {
            rows,
            len,
            src_first,
            src_width,
            dst_first,
            dst_width,
        }
    };
    for s in [
        shape(0, 3, (1, 4), (0, 3)),
        shape(5, 0, (1, 4), (0, 3)),
        shape(1, 7, (0, 7), (0, 7)),
        shape(9, 5, (3, 8), (0, 5)),
        shape(9, 5, (0, 5), (2, 9)),
        shape(33, 11, (6, 17), (3, 15)),
    ] {
        let mut expected = samples::<T>(0, 500);
        let mut dst = device.from_slice(&expected)?;
        for row in 0..s.rows {
            let from = &data[row * s.src_width + s.src_first..][..s.len];
            expected[row * s.dst_width + s.dst_first..][..s.len].copy_from_slice(from);
        }
        B::copy_columns(&mut ctx, &src, &mut dst, s)?;
        expect(
            &format!("{s:?}: dst"),
            &B::to_vec(&mut ctx, &dst)?,
            &expected,
        )?;
    }
    let mut dst = device.from_slice(&samples::<T>(0, 500))?;
    for s in [
        shape(2, 4, (1, 4), (0, 4)),
        shape(2, 4, (0, 4), (1, 4)),
        shape(101, 4, (0, 6), (0, 4)),
        shape(101, 4, (0, 4), (0, 5)),
        shape(2, usize::MAX, (1, 4), (1, 4)),
        shape(usize::MAX, 4, (0, 4), (0, 4)),
    ] {
        let result = B::copy_columns(&mut ctx, &src, &mut dst, s);
        refused.expect(&format!("{s:?}"), result)?;
    }
    Ok(())
}

/// Pieces of one slice, in any order and more than once, for several buffers.
fn write_packed<B: Backend>(device: &B, refused: &mut Refusals) -> Check {
    let mut ctx = device.new_context()?;
    let piece = |from, to, len| UploadPiece { from, to, len };
    // What goes to a buffer of 100, to one of 7, and to one that gets nothing.
    let pieces = [
        vec![
            piece(0, 0, 40),
            piece(95, 60, 5),
            piece(3, 99, 1),
            piece(50, 30, 20),
            piece(9, 3, 0),
        ],
        vec![piece(20, 1, 6)],
        vec![],
    ];
    let mut expected = [100, 7, 3].map(|len| samples::<i32>(500, len));
    let mut buffers = Vec::new();
    for data in &expected {
        buffers.push(device.from_slice(data)?);
    }
    let mut src = samples::<i32>(0, 100);
    for (data, pieces) in expected.iter_mut().zip(&pieces) {
        for piece in pieces {
            data[piece.to..][..piece.len].copy_from_slice(&src[piece.from..][..piece.len]);
        }
    }
    let to = pieces.iter().map(Vec::as_slice);
    B::write_packed(&mut ctx, &src, buffers.iter_mut().zip(to))?;
    // As with `write`, the slice may be used again at once.
    src.fill(0);
    for (buffer, expected) in buffers.iter().zip(&expected) {
        expect("write_packed: dst", &B::to_vec(&mut ctx, buffer)?, expected)?;
    }
    B::write_packed(&mut ctx, &[], buffers.iter_mut().zip([&[][..]; 3]))?;
    for wrong in [
        piece(0, 94, 7),
        piece(94, 0, 7),
        piece(101, 0, 0),
        piece(0, 101, 0),
        piece(usize::MAX, 0, 2),
        piece(0, usize::MAX, 2),
    ] {
        let to = [(&mut buffers[0], &[wrong][..])];
        let result = B::write_packed(&mut ctx, &src, to);
        refused.expect(&format!("{wrong:?} of 100 to 100"), result)?;
    }
    let first = B::to_vec(&mut ctx, &buffers[0])?;
    expect("write_packed after refusals: dst", &first, &expected[0])
}

/// The host may reuse its slice as soon as `write` returns, and recorded work keeps its order.
fn write_copies<B: Backend>(device: &B) -> Check {
    let mut ctx = device.new_context()?;
    let mut buffer = device.alloc::<i32>(8)?;
    let mut copy = device.alloc::<i32>(8)?;
    let mut data = vec![1; 8];
    B::write(&mut ctx, &mut buffer, 0, &data)?;
    data.fill(2);
    B::copy_slice(&mut ctx, &buffer, 0, &mut copy, 0, 8)?;
    B::write(&mut ctx, &mut buffer, 0, &data)?;
    data.fill(3);
    B::sync(&mut ctx)?;
    expect("the copy", &B::to_vec(&mut ctx, &copy)?, &[1; 8])?;
    expect("the buffer", &B::to_vec(&mut ctx, &buffer)?, &[2; 8])
}

/// What one context wrote, another one reads.
fn two_contexts<B: Backend>(device: &B) -> Check {
    let (mut one, mut other) = (device.new_context()?, device.new_context()?);
    let mut buffer = device.alloc::<f32>(33)?;
    B::write(&mut one, &mut buffer, 0, &[1.5; 33])?;
    B::sync(&mut one)?;
    expect("the buffer", &B::to_vec(&mut other, &buffer)?, &[1.5; 33])
}

/// A device number that does not exist is an error that says so.
fn no_such_device<B: Backend>(device: &B) -> Check {
    let info = device.info();
    let devices = B::devices();
    if !devices.iter().any(|other| other.ordinal == info.ordinal) {
        return wrong(format!(
            "device {} is not in the list of devices",
            info.ordinal
        ));
    }
    match B::open(devices.len() + 1000) {
        Err(Error::NoDevice { .. }) => Ok(()),
        Err(error) => Err(CaseError::Error(error)),
        Ok(_) => wrong("a device that is not in the list was opened"),
    }
}

pub(super) fn cases<B: Backend>(cases: &mut Cases<B>) {
    typed::<B, f32>(cases);
    typed::<B, f16>(cases);
    typed::<B, bf16>(cases);
    typed::<B, i32>(cases);
    typed::<B, u32>(cases);
    typed::<B, i8>(cases);
    typed::<B, u8>(cases);
    cases.check(
        ("write", "i32", "copies at once, keeps the order"),
        write_copies::<B>,
    );
    cases.refuses(
        ("write_packed", "i32", "pieces for several buffers"),
        both!(write_packed),
    );
    cases.check(
        ("sync", "f32", "one context after another"),
        two_contexts::<B>,
    );
    cases.check(
        ("open", "-", "a device that does not exist"),
        no_such_device::<B>,
    );
}

fn typed<B: Backend, T: Sample>(cases: &mut Cases<B>) {
    let dtype = T::DTYPE.name();
    cases.check(("alloc", dtype, "zeros of several lengths"), alloc::<B, T>);
    cases.check(("from_slice", dtype, "several lengths"), from_slice::<B, T>);
    cases.refuses(("write", dtype, "at several offsets"), both!(write, T));
    cases.refuses(("read", dtype, "at several offsets"), both!(read, T));
    let name = "finished later, at several offsets";
    cases.refuses(("begin_read", dtype, name), both!(begin_read, T));
    cases.refuses(
        ("copy_slice", dtype, "at several offsets"),
        both!(copy_slice, T),
    );
    cases.refuses(
        ("copy_columns", dtype, "of several widths"),
        both!(copy_columns, T),
    );
}
