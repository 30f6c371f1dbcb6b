//! Zeroed memory straight from the system, for what is large and lives long.
//!
//! An allocator would zero such memory by writing to it: one thread would then take all page faults,
//! in small pages, before the first byte is loaded. Fresh pages are zero by themselves, come when they
//! are first touched (by the threads that pack a weight), and can be asked to be huge ones before
//! that, which saves the page walks of a stream that touches each page once.

use std::ptr::NonNull;

/// A mapping of its own.
#[derive(Debug)]
pub(crate) struct Pages {
    #[cfg(target_os = "linux")]
    base: NonNull<u8>,
    #[cfg(target_os = "linux")]
    size: usize,
    start: NonNull<u8>,
}

#[cfg(target_os = "linux")]
mod linux {
    //! The calls and their numbers, as in `<sys/mman.h>`; the standard library links them already.

    pub(super) const PROT_READ_WRITE: i32 = 1 | 2;
    pub(super) const MAP_PRIVATE_ANONYMOUS: i32 = 0x02 | 0x20;
    pub(super) const MADV_HUGEPAGE: i32 = 14;

    unsafe extern "C" {
        pub(super) fn mmap(
            addr: *mut u8,
            len: usize,
            prot: i32,
            flags: i32,
            fd: i32,
            offset: isize,
        ) -> *mut u8;
        pub(super) fn munmap(addr: *mut u8, len: usize) -> i32;
        pub(super) fn madvise(addr: *mut u8, len: usize, advice: i32) -> i32;
    }
}

/// A huge page of every processor that has them in this size; elsewhere a harmless alignment.
#[cfg(target_os = "linux")]
const HUGE: usize = 2 << 20;

#[cfg(all(target_os = "linux", target_pointer_width = "64"))]
impl Pages {
    /// Pages for `bytes`, or `None` when that is too little to be worth a mapping.
    pub(crate) fn for_size(bytes: usize) -> Option<std::io::Result<Self>> {
        (bytes >= HUGE).then(|| Self::map(bytes))
    }

    fn map(bytes: usize) -> std::io::Result<Self> {
        use linux::*;
        // Room to begin at a multiple of the huge page size; what is not touched costs nothing.
        let size = bytes
            .checked_add(2 * HUGE)
            .ok_or(std::io::ErrorKind::OutOfMemory)?;
        let null = std::ptr::null_mut();
        // SAFETY: a new private mapping at an address of the system's choice touches no other memory.
        let base = unsafe { mmap(null, size, PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS, -1, 0) };
        let base = NonNull::new(base)
            .filter(|base| base.as_ptr() as isize != -1)
            .ok_or_else(std::io::Error::last_os_error)?;
        let skip = base.as_ptr().align_offset(HUGE);
        // SAFETY: `skip < HUGE`, and the mapping is 2 · HUGE longer than `bytes`.
        let start = unsafe { base.add(skip) };
        // The rest stays in small pages: a huge one would be held whole.
        // SAFETY: the range lies in the mapping made above; the advice changes no contents, and its
        // failure nothing but speed.
        unsafe { madvise(start.as_ptr(), bytes / HUGE * HUGE, MADV_HUGEPAGE) };
        Ok(Self { base, size, start })
    }
}

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
impl Pages {
    /// Elsewhere the allocator serves all sizes.
    pub(crate) fn for_size(_bytes: usize) -> Option<std::io::Result<Self>> {
        None
    }
}

impl Pages {
    /// Where the memory begins: a multiple of the size of a huge page.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        #[cfg(target_os = "linux")]
        // SAFETY: the mapping was made in `map` with this size and nobody has it any more.
        unsafe {
            linux::munmap(self.base.as_ptr(), self.size)
        };
    }
}
