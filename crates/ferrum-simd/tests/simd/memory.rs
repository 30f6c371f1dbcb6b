//! Buffers.

use ferrum_simd::memory::{CpuBuffer, SharedMut};
use ferrum_types::Error;

#[test]
fn buffers_are_aligned_zeroed_and_checked() {
    for len in [0, 1, 17, 4096, (3 << 20) + 3] {
        let b = CpuBuffer::<f32>::zeroed(len).unwrap();
        assert_eq!(b.as_slice().len(), len);
        assert!(b.as_slice().iter().all(|x| *x == 0.0));
        assert!(len == 0 || (b.as_slice().as_ptr() as usize).is_multiple_of(64));
    }
    for len in [usize::MAX, usize::MAX / 4, isize::MAX as usize] {
        let e = CpuBuffer::<f32>::zeroed(len).unwrap_err();
        assert!(matches!(e, Error::OutOfMemory { .. }), "{e}");
    }
}

#[test]
#[should_panic(expected = "part out of range")]
fn a_part_must_lie_inside() {
    let mut x = [0u8; 4];
    // SAFETY: the only part.
    unsafe { SharedMut::new(&mut x).part(3, 2) };
}
