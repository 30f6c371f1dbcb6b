//! Intel AMX: eight tile registers of sixteen rows of 64 bytes each, and products of tiles.
//!
//! What every kernel with tiles needs: whether there are any, and their configuration. The compiler has no stable
//! intrinsics for AMX, so kernels are inline assembly. A block of assembly assumes nothing of the contents of tiles, unless
//! it says so: it begins with `tilezero` or `tileloadd`, and ends with `tilestored`.
//!
//! Tiles and their configuration belong to a thread. Linux allocates memory for a thread's tiles (8 KiB) when it first
//! uses one, and saves them at each switch to another thread while they are in use. So a task of the pool configures tiles
//! when it begins and releases them when it ends, whoever runs it ([`Tiles`]): about a hundred nanoseconds in a task of
//! ten microseconds or more.

use core::arch::asm;
use core::arch::x86_64::__cpuid_count;
use std::marker::PhantomData;
use std::sync::OnceLock;

/// Rows of a tile.
pub(crate) const TILE_ROWS: usize = 16;
/// Bytes of a row of a tile.
pub(crate) const ROW_BYTES: usize = 64;

/// Whether this process may use tiles: the processor has products of bf16, the system saves tiles, and
/// has granted them. The first call asks the system for that, which holds for all threads and cannot be undone.
pub(crate) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_instructions() && system_saves_tiles() && system::request_tiles())
}

fn has_instructions() -> bool {
    /// AMX-BF16 and AMX-TILE in EDX of leaf 7.
    const FEATURES: u32 = 1 << 22 | 1 << 24;
    let last_leaf = __cpuid_count(0, 0).eax;
    last_leaf >= 7 && __cpuid_count(7, 0).edx & FEATURES == FEATURES
}

/// Whether the system has enabled the configuration and the contents of tiles in XCR0.
fn system_saves_tiles() -> bool {
    const OSXSAVE: u32 = 1 << 27;
    const TILE_STATE: u32 = 1 << 17 | 1 << 18;
    if __cpuid_count(1, 0).ecx & OSXSAVE == 0 {
        return false;
    }
    let low: u32;
    // SAFETY: OSXSAVE says that the instruction exists and that the system has enabled it; XCR0 always exists.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _, options(nomem, nostack, preserves_flags));
    }
    low & TILE_STATE == TILE_STATE
}

#[cfg(target_os = "linux")]
mod system {
    //! The call, and its numbers as in `<asm/prctl.h>`; the standard library links it already.

    const ARCH_PRCTL: isize = 158;
    const ARCH_REQ_XCOMP_PERM: isize = 0x1023;
    const XFEATURE_XTILEDATA: isize = 18;

    unsafe extern "C" {
        fn syscall(number: isize, ...) -> isize;
    }

    /// Asks for the contents of tiles. Fails where a thread has a signal stack that is too small to hold them.
    pub(super) fn request_tiles() -> bool {
        // SAFETY: the arguments are integers, and the call writes no memory of this process.
        let refused = unsafe { syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) };
        refused == 0
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    //! How other systems grant tiles has not been tried.

    pub(super) fn request_tiles() -> bool {
        false
    }
}

/// What `ldtilecfg` loads.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Eight whole tiles.
static WHOLE_TILES: Config = {
    let mut config = Config {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes: [0; 16],
        rows: [0; 16],
    };
    let mut tile = 0;
    while tile < 8 {
        config.row_bytes[tile] = ROW_BYTES as u16;
        config.rows[tile] = TILE_ROWS as u8;
        tile += 1;
    }
    config
};

/// The tiles of this thread, eight of [`TILE_ROWS`] rows of [`ROW_BYTES`] bytes, until it is dropped.
pub(crate) struct Tiles(PhantomData<*mut ()>);

impl Tiles {
    /// Configures the tiles of this thread; their contents are zeros.
    ///
    /// # Safety
    /// [`is_available`] has said that there are tiles, and no other value of this type lives on this thread.
    #[inline]
    pub(crate) unsafe fn configure() -> Self {
        // SAFETY: the caller says that the instruction exists. The operand is 64 bytes of a valid configuration: palette
        // 1 has eight tiles of that size, and reserved bytes are zero. No code that the compiler makes uses tiles, and
        // no kernel expects their contents from before.
        unsafe {
            asm!(
                "ldtilecfg [{}]",
                in(reg) &raw const WHOLE_TILES,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(readonly, nostack, preserves_flags),
            );
        }
        Self(PhantomData)
    }
}

impl Drop for Tiles {
    /// Releases the tiles, so that the system need not save them any more.
    fn drop(&mut self) {
        // SAFETY: `configure` ran on this thread (the type is not `Send`), so the instruction exists; kernels that use
        // tiles borrow this value, so none is running.
        unsafe {
            asm!(
                "tilerelease",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nomem, nostack, preserves_flags),
            );
        }
    }
}
