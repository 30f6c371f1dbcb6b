//! Mappings of Linux, whole and in pieces.
//!
//! On machines with several memory nodes, pages go to them in turns: any thread may take any part of a
//! weight, and together the threads then read from all memories. Only nodes of cores that the process
//! may use take part, so one that is bound to a node stays there.

use crate::threads::topology;
use std::io;
use std::ptr::NonNull;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

/// A mapping of its own, or a piece of one.
#[derive(Debug)]
pub struct Pages {
    start: NonNull<u8>,
    /// Kept for its drop.
    _mapping: Arc<Mapping>,
    /// Bytes of a piece, whose pages go back before the mapping does.
    piece: usize,
}

/// What the system gave.
#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    size: usize,
    start: NonNull<u8>,
}

// SAFETY: a mapping is an address range; what is in it belongs to the owners of disjoint pieces.
unsafe impl Send for Mapping {}
// SAFETY: as above; nothing is read or written through it.
unsafe impl Sync for Mapping {}

/// The mapping that pieces are cut from, and how much of it is gone.
struct Open {
    mapping: Weak<Mapping>,
    used: usize,
}

static OPEN: Mutex<Open> = Mutex::new(Open {
    mapping: Weak::new(),
    used: 0,
});

mod system {
    //! The calls and their numbers, as in `<sys/mman.h>`; the standard library links them already.

    pub(super) const PROT_READ_WRITE: i32 = 1 | 2;
    pub(super) const MAP_PRIVATE_ANONYMOUS: i32 = 0x02 | 0x20;
    pub(super) const MADV_DONTNEED: i32 = 4;
    pub(super) const MADV_HUGEPAGE: i32 = 14;

    /// As in `<linux/mempolicy.h>`.
    pub(super) const MPOL_INTERLEAVE: usize = 3;
    /// Number of `set_mempolicy`.
    pub(super) const SET_MEMPOLICY: Option<isize> = match () {
        _ if cfg!(target_arch = "x86_64") => Some(238),
        _ if cfg!(any(target_arch = "aarch64", target_arch = "riscv64")) => Some(237),
        _ => None,
    };
    /// Number of `mbind`, which the C library has no function for.
    pub(super) const MBIND: Option<isize> = match () {
        _ if cfg!(target_arch = "x86_64") => Some(237),
        _ if cfg!(any(target_arch = "aarch64", target_arch = "riscv64")) => Some(235),
        _ => None,
    };

    unsafe extern "C" {
        pub(super) fn syscall(number: isize, ...) -> isize;
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

/// Memory nodes, a bit each.
pub type Nodes = [u64; 16];

/// The nodes that pages go to in turns, if there are several.
static NODES: LazyLock<Option<Nodes>> = LazyLock::new(|| {
    let nodes = topology::nodes();
    (nodes.len() > 1).then(|| node_bits(&nodes))
});

/// Nodes as the system takes them. Those of higher numbers are left out.
pub fn node_bits(nodes: &[u32]) -> Nodes {
    let mut bits = [0; 16];
    for node in nodes {
        if let Some(word) = bits.get_mut(*node as usize / 64) {
            *word |= 1 << (node % 64);
        }
    }
    bits
}

/// Has what this thread allocates from now on, pages of files included, come from all nodes in turns, as
/// mappings do; on one node there is nothing to do.
pub fn interleave_thread() {
    if let Some(nodes) = &*NODES {
        // Without it, pages of files are where their first reader or writer ran.
        let _ = set_policy(nodes);
    }
}

/// Has what this thread allocates from now on come from `nodes` in turns.
///
/// # Errors
/// What the system says.
pub fn set_policy(nodes: &Nodes) -> io::Result<()> {
    use system::*;
    let number = SET_MEMPOLICY.ok_or(io::ErrorKind::Unsupported)?;
    // The call takes one more than the number of bits.
    let count = nodes.len() * 64 + 1;
    // SAFETY: the call reads the bits of `nodes`, and changes where later pages of this thread come from.
    let done = unsafe { syscall(number, MPOL_INTERLEAVE, nodes.as_ptr(), count) };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A huge page of every processor that has them in this size; elsewhere a harmless alignment.
const HUGE: usize = 2 << 20;

/// Bytes of a mapping that several pieces share.
const SHARED: usize = 64 << 20;
/// The least that is worth a piece; no system has larger pages, apart from huge ones.
const GRAIN: usize = 64 << 10;

impl Pages {
    /// Pages for `bytes`, or `None` when that is too little to be worth a mapping.
    pub fn for_size(bytes: usize) -> Option<io::Result<Self>> {
        // The rest stays in small pages: a huge one would be held whole.
        (bytes >= HUGE).then(|| Ok(Self::whole(Mapping::new(bytes, bytes / HUGE * HUGE)?)))
    }

    /// Pages for `bytes` that live long and are read often, beside others of that kind and in huge pages
    /// from end to end; or `None` when that is too little.
    pub fn zeroed_for_weights(bytes: usize) -> Option<io::Result<Self>> {
        (bytes >= GRAIN).then(|| Self::cut(bytes))
    }

    fn cut(bytes: usize) -> io::Result<Self> {
        if bytes > SHARED / 2 {
            let all = bytes.checked_next_multiple_of(HUGE);
            let all = all.ok_or(io::ErrorKind::OutOfMemory)?;
            return Ok(Self::whole(Mapping::new(all, all)?));
        }
        // Nothing that can panic runs under the lock.
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let mapping = open.mapping.upgrade();
        let mapping = match mapping.filter(|_| bytes <= SHARED - open.used) {
            Some(mapping) => mapping,
            None => {
                let mapping = Arc::new(Mapping::new(SHARED, SHARED)?);
                (open.mapping, open.used) = (Arc::downgrade(&mapping), 0);
                mapping
            }
        };
        // SAFETY: `used` is at most the length of the mapping.
        let start = unsafe { mapping.start.add(open.used) };
        // The next one begins with a cache line.
        open.used = (open.used + bytes).next_multiple_of(64);
        Ok(Self {
            start,
            _mapping: mapping,
            piece: bytes,
        })
    }

    /// Pages for `bytes` in huge pages that come from `nodes` in turns.
    ///
    /// # Errors
    /// What the system says: it has no memory, or no such nodes.
    pub fn on_nodes(bytes: usize, nodes: &Nodes) -> io::Result<Self> {
        let mapping = Mapping::new(bytes, bytes)?;
        mapping.interleave(nodes)?;
        Ok(Self::whole(mapping))
    }

    fn whole(mapping: Mapping) -> Self {
        Self {
            start: mapping.start,
            _mapping: Arc::new(mapping),
            piece: 0,
        }
    }

    /// Where the memory begins: a multiple of the size of a huge page, or of a cache line in a piece.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Mapping {
    /// Pages for `bytes`, of which the first `huge` are better huge.
    fn new(bytes: usize, huge: usize) -> io::Result<Self> {
        use system::*;
        // Room to begin at a multiple of the huge page size; what is not touched costs nothing.
        let size = bytes
            .checked_add(2 * HUGE)
            .ok_or(io::ErrorKind::OutOfMemory)?;
        let null = std::ptr::null_mut();
        // SAFETY: a new private mapping at an address of the system's choice touches no other memory.
        let base = unsafe { mmap(null, size, PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS, -1, 0) };
        let base = NonNull::new(base)
            .filter(|base| base.as_ptr() as isize != -1)
            .ok_or_else(io::Error::last_os_error)?;
        let skip = base.as_ptr().align_offset(HUGE);
        // SAFETY: `skip < HUGE`, and the mapping is 2 · HUGE longer than `bytes`.
        let start = unsafe { base.add(skip) };
        // SAFETY: the range lies in the mapping made above; the advice changes no contents, and its
        // failure nothing but speed.
        unsafe { madvise(start.as_ptr(), huge, MADV_HUGEPAGE) };
        let mapping = Self { base, size, start };
        if let Some(nodes) = &*NODES {
            // Without it, pages go where they are first touched.
            let _ = mapping.interleave(nodes);
        }
        Ok(mapping)
    }

    /// Has the pages of the mapping, none of which was touched, come from `nodes` in turns.
    fn interleave(&self, nodes: &Nodes) -> io::Result<()> {
        use system::*;
        let number = MBIND.ok_or(io::ErrorKind::Unsupported)?;
        // The call takes one more than the number of bits.
        let count = nodes.len() * 64 + 1;
        let (base, size) = (self.base.as_ptr(), self.size);
        let none = 0usize;
        // SAFETY: the range is this mapping; the policy is about where pages come from, not about what
        // is in them, and the call reads the bits of `nodes` only.
        let done = unsafe {
            syscall(
                number,
                base,
                size,
                MPOL_INTERLEAVE,
                nodes.as_ptr(),
                count,
                none,
            )
        };
        match done {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Pages {
    /// Gives the pages of a piece back, however long its neighbours live. They are not handed out again, and the
    /// two at its ends stay until the mapping goes.
    fn drop(&mut self) {
        let skip = self.start.as_ptr().align_offset(GRAIN);
        let len = self.piece.saturating_sub(skip) / GRAIN * GRAIN;
        if len > 0 {
            // SAFETY: the range lies in this piece, which has one owner, and both its ends are
            // multiples of every size of page, so no neighbour loses anything.
            unsafe { system::madvise(self.start.as_ptr().add(skip), len, system::MADV_DONTNEED) };
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `new` with this size and no piece of it is left.
        unsafe { system::munmap(self.base.as_ptr(), self.size) };
    }
}
