//! Memory of this device: plain host memory, aligned for vectors. Large buffers come straight from the
//! system ([`super::pages`]), in huge pages where it has them.

use super::pages::Pages;
use ferrum_types::{Element, Error, Result};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

/// A cache line, and an AVX-512 register.
const ALIGN: usize = 64;

/// `len` elements of `T` in memory of their own.
#[derive(Debug)]
pub struct CpuBuffer<T: Element> {
    ptr: NonNull<T>,
    len: usize,
    memory: Memory,
}

/// Whom the memory goes back to.
#[derive(Debug)]
enum Memory {
    /// No memory.
    None,
    Heap(Layout),
    /// Kept for its drop.
    Pages(#[expect(dead_code, reason = "owns the memory")] Pages),
}

// SAFETY: the buffer owns its memory like a `Vec<T>`, and elements are `Send + Sync`.
unsafe impl<T: Element> Send for CpuBuffer<T> {}
// SAFETY: as above.
unsafe impl<T: Element> Sync for CpuBuffer<T> {}

impl<T: Element> CpuBuffer<T> {
    /// `len` zeros.
    ///
    /// # Errors
    /// [`OutOfMemory`](Error::OutOfMemory).
    pub fn zeroed(len: usize) -> Result<Self> {
        Self::with_pages(len, Pages::for_size)
    }

    /// `len` zeros for what lives long and is read often, as weights are.
    ///
    /// # Errors
    /// [`OutOfMemory`](Error::OutOfMemory).
    pub fn zeroed_for_weights(len: usize) -> Result<Self> {
        Self::with_pages(len, Pages::zeroed_for_weights)
    }

    /// `len` zeros, in what `pages` gives for so many bytes, if it does.
    fn with_pages(
        len: usize,
        pages: impl Fn(usize) -> Option<std::io::Result<Pages>>,
    ) -> Result<Self> {
        let failed = |reason: &str| Error::OutOfMemory {
            backend: "cpu",
            requested: (len as u64).saturating_mul(size_of::<T>() as u64),
            reason: reason.to_owned(),
        };
        let layout = len
            .checked_mul(size_of::<T>())
            .and_then(|bytes| Layout::from_size_align(bytes, ALIGN).ok())
            .ok_or_else(|| failed("more than the address space"))?;
        let (ptr, memory) = if layout.size() == 0 {
            (NonNull::dangling(), Memory::None)
        } else if let Some(pages) = pages(layout.size()) {
            let pages = pages.map_err(|error| failed(&error.to_string()))?;
            (pages.start().cast(), Memory::Pages(pages))
        } else {
            // SAFETY: the size is not zero.
            let raw = NonNull::new(unsafe { alloc_zeroed(layout) });
            let raw = raw.ok_or_else(|| failed("the allocator refused"))?;
            (raw.cast(), Memory::Heap(layout))
        };
        Ok(Self { ptr, len, memory })
    }

    /// A copy of `data`.
    ///
    /// # Errors
    /// [`OutOfMemory`](Error::OutOfMemory).
    pub fn copy_of(data: &[T]) -> Result<Self> {
        let mut buffer = Self::zeroed(data.len())?;
        buffer.as_mut_slice().copy_from_slice(data);
        Ok(buffer)
    }

    /// The elements.
    pub fn as_slice(&self) -> &[T] {
        // SAFETY: `ptr` is valid for `len` initialised elements (or dangling and `len` is 0), and the
        // borrow of `self` keeps writers away.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }

    /// The elements, to write.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as in `as_slice`, with an exclusive borrow of `self`.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl<T: Element> Drop for CpuBuffer<T> {
    fn drop(&mut self) {
        if let Memory::Heap(layout) = self.memory {
            // SAFETY: allocated in `zeroed` with this layout; elements need no drop.
            unsafe { dealloc(self.ptr.as_ptr().cast(), layout) }
        }
    }
}

/// Bytes that never change, with their owner: a buffer, one of several matrices that share a buffer
/// (as the many small ones of a stack of experts do, which are packed as one), or a mapped file.
#[derive(Clone)]
pub struct SharedBytes {
    start: NonNull<u8>,
    len: usize,
    /// Keeps the bytes.
    owner: Arc<dyn Send + Sync>,
}

// SAFETY: the bytes are only read, and the owner that keeps them is `Send + Sync`.
unsafe impl Send for SharedBytes {}
// SAFETY: as above.
unsafe impl Sync for SharedBytes {}

impl SharedBytes {
    /// `range` of the bytes of `owner`; `None` when they do not reach so far.
    pub fn of_owner<T>(owner: Arc<T>, range: Range<usize>) -> Option<Self>
    where
        T: AsRef<[u8]> + Send + Sync + 'static,
    {
        // The owner stays where it is and is not written to: there is no `&mut T` of a shared `Arc`, and what
        // a `T` lends as `&[u8]` for as long as it is borrowed stays valid for as long as it is kept here.
        let bytes = (*owner).as_ref().get(range)?;
        Some(Self {
            start: NonNull::from(bytes).cast(),
            len: bytes.len(),
            owner,
        })
    }

    /// `buffer` in `count` parts of one size.
    pub(crate) fn split(buffer: CpuBuffer<u8>, count: usize) -> impl Iterator<Item = Self> {
        let size = buffer.len.checked_div(count).unwrap_or(0);
        let buffer = Arc::new(buffer);
        let part = move |i| Self::of_owner(Arc::clone(&buffer), i * size..(i + 1) * size);
        (0..count).filter_map(part)
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the bytes were borrowed from the owner, which is kept and never written to.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// Part `range` of the bytes; `None` when they do not reach so far.
    pub fn part(&self, range: Range<usize>) -> Option<Self> {
        let bytes = self.as_slice().get(range)?;
        Some(Self {
            start: NonNull::from(bytes).cast(),
            len: bytes.len(),
            owner: Arc::clone(&self.owner),
        })
    }
}

impl std::fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SharedBytes({} bytes)", self.len)
    }
}

impl AsRef<[u8]> for CpuBuffer<u8> {
    fn as_ref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl From<CpuBuffer<u8>> for SharedBytes {
    fn from(buffer: CpuBuffer<u8>) -> Self {
        Self {
            start: buffer.ptr,
            len: buffer.len,
            owner: Arc::new(buffer),
        }
    }
}

/// A pointer into a buffer whose parts several tasks of one region write.
///
/// Made from an exclusive borrow, which outlives the region; what each task may write is the promise
/// of the code that calls [`part`](Self::part).
#[derive(Clone, Copy)]
pub struct SharedMut<'a, T> {
    ptr: *mut T,
    len: usize,
    _borrow: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for a `&mut [T]` that is handed out in disjoint parts (contract of `part`).
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    /// Shares `slice` among tasks.
    pub fn new(slice: &'a mut [T]) -> Self {
        Self {
            ptr: slice.as_mut_ptr(),
            len: slice.len(),
            _borrow: std::marker::PhantomData,
        }
    }

    /// Where elements `start..start + len` lie.
    ///
    /// # Panics
    /// When they do not lie inside.
    #[inline(always)]
    pub fn at(&self, start: usize, len: usize) -> *mut T {
        assert!(
            start <= self.len && len <= self.len - start,
            "part out of range"
        );
        self.ptr.wrapping_add(start)
    }

    /// Elements `start..start + len`, to write.
    ///
    /// # Safety
    /// No other live part, in any task, overlaps this one.
    ///
    /// # Panics
    /// When the part does not lie inside.
    #[inline(always)]
    pub unsafe fn part(&self, start: usize, len: usize) -> &'a mut [T] {
        // SAFETY: in range (checked by `at`); alone by the caller's contract.
        unsafe { std::slice::from_raw_parts_mut(self.at(start, len), len) }
    }
}
