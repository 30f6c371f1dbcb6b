//! Collectives between devices through NCCL, where its library is there and each rank has a device of its own.
//!
//! The library is opened at run time, by the name that NVIDIA's packages install (`libnccl.so.2`), which cudarc's loader does
//! not try. Ranks agree through their group's transport on whether they use it, and on its unique id, so they may be
//! threads or processes.
//!
//! A communicator does not block, and a thread watches it: when the group ends or a link breaks, it aborts what the device waits
//! for, and [`Communicator::check`] says why. Ranks that make different collectives are not noticed, as the library does
//! not look.

use super::driver::Driver;
use super::stream::{Event, Stream};
use super::sync::lock;
use crate::backend::{GroupCall, GroupHandle, ReduceOp};
use ferrum_types::{Dtype, Error, Result};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How a context reaches the other ranks of its group.
#[derive(Default)]
pub(super) enum Link {
    /// Decided in the first collective, which all ranks make.
    #[default]
    Undecided,
    /// Through host memory.
    Host,
    /// By NCCL.
    Nccl(Arc<Communicator>),
}

impl Link {
    pub(super) fn nccl(&self) -> Option<&Arc<Communicator>> {
        match self {
            Self::Nccl(nccl) => Some(nccl),
            _ => None,
        }
    }
}

/// What messages call this transport.
const NAME: &str = "nccl";

/// Names of the library: the one that packages install, and that of an installation with headers.
const FILES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// The oldest library that takes [`Config`]: 2.18.
const OLDEST: c_int = 21_800;

/// Time between two looks of the thread that watches.
const WATCH_INTERVAL: Duration = Duration::from_millis(20);

/// How long a rank that leaves waits for its own work, and for the others to leave, before it aborts.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);

const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;

/// `ncclUint8`, in which gathers and broadcasts count whatever elements they have.
const BYTES: c_int = 1;

/// `ncclComm_t`. The library lets any thread use it, one at a time.
#[derive(Clone, Copy, Debug)]
struct Handle(*mut c_void);

// SAFETY: see above; all uses are behind a lock.
unsafe impl Send for Handle {}

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct UniqueId([u8; 128]);

/// `ncclConfig_t` of version 2.18; later libraries take it, too, by its size and version.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// A communicator that does not block, and otherwise what the library thinks best.
    fn non_blocking() -> Self {
        const UNDEFINED: c_int = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: OLDEST.cast_unsigned(),
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: null(),
            split_share: UNDEFINED,
        }
    }
}

type Address = *const c_void;
type Place = *mut c_void;

/// The functions of the library. Its results are plain numbers here: later versions have more of them.
struct Library {
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init: unsafe extern "C" fn(*mut Place, c_int, UniqueId, c_int, *mut Config) -> c_int,
    async_error: unsafe extern "C" fn(Place, *mut c_int) -> c_int,
    finalize: unsafe extern "C" fn(Place) -> c_int,
    destroy: unsafe extern "C" fn(Place) -> c_int,
    abort: unsafe extern "C" fn(Place) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(Place) -> *const c_char,
    all_reduce: unsafe extern "C" fn(Address, Place, usize, c_int, c_int, Place, Place) -> c_int,
    all_gather: unsafe extern "C" fn(Address, Place, usize, c_int, Place, Place) -> c_int,
    broadcast: unsafe extern "C" fn(Address, Place, usize, c_int, c_int, Place, Place) -> c_int,
    /// Keeps the functions where they are.
    _file: libloading::Library,
}

/// The library of this process; `None` where there is none, or one that is too old.
fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    LIBRARY.get_or_init(Library::open).as_ref()
}

impl Library {
    fn open() -> Option<Self> {
        // SAFETY: opens libraries by their names, whose initialisers are NVIDIA's; functions have the types of `nccl.h`, and
        // stay as long as `_file`.
        unsafe {
            let file = FILES
                .iter()
                .find_map(|name| libloading::Library::new(*name).ok())?;
            let mut version = 0;
            let ask = file.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion\0");
            if ask.ok()?(&mut version) != SUCCESS || version < OLDEST {
                return None;
            }
            Some(Self {
                get_unique_id: *file.get(b"ncclGetUniqueId\0").ok()?,
                init: *file.get(b"ncclCommInitRankConfig\0").ok()?,
                async_error: *file.get(b"ncclCommGetAsyncError\0").ok()?,
                finalize: *file.get(b"ncclCommFinalize\0").ok()?,
                destroy: *file.get(b"ncclCommDestroy\0").ok()?,
                abort: *file.get(b"ncclCommAbort\0").ok()?,
                error_string: *file.get(b"ncclGetErrorString\0").ok()?,
                last_error: *file.get(b"ncclGetLastError\0").ok()?,
                all_reduce: *file.get(b"ncclAllReduce\0").ok()?,
                all_gather: *file.get(b"ncclAllGather\0").ok()?,
                broadcast: *file.get(b"ncclBroadcast\0").ok()?,
                _file: file,
            })
        }
    }

    /// What the library says of a result.
    fn words(&self, code: c_int, comm: Place) -> String {
        let text = |text: *const c_char| match text.is_null() {
            true => String::new(),
            // SAFETY: the library's texts end with zero, and stay until its next call on this thread.
            false => unsafe { CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned(),
        };
        // SAFETY: the communicator is null or held.
        let (code, last) = unsafe { ((self.error_string)(code), (self.last_error)(comm)) };
        let (code, last) = (text(code), text(last));
        match last.trim() {
            "" => code,
            last => format!("{code}: {last}"),
        }
    }
}

/// What a rank tells the others before they connect: whether it has the library, and its device.
const RECORD: usize = 1 + 16;

/// Whether the ranks of these records connect: all have the library, and a device each.
fn connects(records: &[&[u8]]) -> bool {
    let mut devices: Vec<&[u8]> = Vec::new();
    records.len() > 1
        && records.iter().all(|record| match record {
            [1, device @ ..] if !devices.contains(&device) => {
                devices.push(device);
                true
            }
            _ => false,
        })
}

/// What the threads of a rank share of its communicator.
struct State {
    library: &'static Library,
    /// `None` once it was aborted or destroyed.
    comm: Mutex<Option<Handle>>,
    has_aborted: AtomicBool,
    group: GroupHandle,
    driver: Arc<Driver>,
    is_leaving: Mutex<bool>,
    left: Condvar,
}

/// A rank's end of a communicator.
pub(super) struct Communicator {
    state: Arc<State>,
    watch: Option<JoinHandle<()>>,
}

impl Communicator {
    /// Connects the ranks of a group, all of which call this; `None` for all where they have to go through host memory.
    ///
    /// # Errors
    /// `Device` when the group has ended, or the library cannot connect, which ends it.
    pub(super) fn connect(group: &GroupHandle, driver: &Arc<Driver>) -> Result<Option<Self>> {
        const OP: &str = "connect";
        let library = library();
        let call = |len| GroupCall {
            op: OP,
            dtype: Dtype::U8,
            len,
            detail: 0,
        };
        group.post(call(RECORD), RECORD, &mut |record| {
            record[0] = u8::from(library.is_some());
            record[1..].copy_from_slice(&driver.uuid()?);
            Ok(())
        })?;
        let mut connected = false;
        group.gather(&mut |records| {
            connected = connects(records);
            Ok(())
        })?;
        let Some(library) = library.filter(|_| connected) else {
            return Ok(None);
        };
        // The library waits for the ranks of an id, so there is none before they have agreed.
        let mut id = UniqueId([0; 128]);
        let given = if group.rank() == 0 { id.0.len() } else { 0 };
        group.post(call(id.0.len()), given, &mut |bytes| {
            if bytes.is_empty() {
                return Ok(());
            }
            // SAFETY: `id` outlives the call.
            match unsafe { (library.get_unique_id)(&mut id) } {
                SUCCESS => bytes.copy_from_slice(&id.0),
                code => return Err(error(OP, library.words(code, null_mut()))),
            }
            Ok(())
        })?;
        group.gather(&mut |ranks| {
            let wrong = |_| Error::invalid(OP, "the unique id has another length");
            id = UniqueId(ranks[0].try_into().map_err(wrong)?);
            Ok(())
        })?;
        Self::new(library, id, group, driver).map(Some)
    }

    fn new(
        library: &'static Library,
        id: UniqueId,
        group: &GroupHandle,
        driver: &Arc<Driver>,
    ) -> Result<Self> {
        const OP: &str = "connect";
        let count = |n: usize| c_int::try_from(n).unwrap_or(c_int::MAX);
        let (mut comm, mut config) = (null_mut(), Config::non_blocking());
        driver.bind(OP)?;
        // SAFETY: the device's context is current; both outlive the call.
        let code = unsafe {
            (library.init)(
                &mut comm,
                count(group.size()),
                id,
                count(group.rank()),
                &mut config,
            )
        };
        let state = Arc::new(State {
            library,
            comm: Mutex::new((!comm.is_null()).then_some(Handle(comm))),
            has_aborted: AtomicBool::new(false),
            group: Arc::clone(group),
            driver: Arc::clone(driver),
            is_leaving: Mutex::new(false),
            left: Condvar::new(),
        });
        let mut connected = Self { state, watch: None };
        let state = &connected.state;
        state.settle(OP, code)?;
        let watched = Arc::clone(state);
        let thread = std::thread::Builder::new().name(format!("nccl {}", group.rank()));
        let watch = thread.spawn(move || watched.watch());
        connected.watch = Some(watch.map_err(|e| state.fail(OP, e.to_string()))?);
        Ok(connected)
    }

    /// Whether what was waited for is what the ranks made: an error once the communicator was aborted.
    pub(super) fn check(&self, op: &'static str) -> Result<()> {
        match self.state.has_aborted.load(Ordering::Acquire) {
            true => Err(self.state.ended(op)),
            false => Ok(()),
        }
    }

    /// Calls `f` while the communicator is there: to add work to a stream that uses it.
    pub(super) fn while_open<R>(
        &self,
        op: &'static str,
        f: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        self.check(op)?;
        let comm = lock(&self.state.comm);
        match *comm {
            Some(_) => f(),
            None => Err(self.state.ended(op)),
        }
    }

    /// Combines `len` elements at `at` over all ranks, in an order of the library's.
    pub(super) fn all_reduce(
        &self,
        op: &'static str,
        stream: &Stream,
        (at, len, dtype): (u64, usize, Dtype),
        reduce: ReduceOp,
    ) -> Result<()> {
        let dtype = match dtype {
            Dtype::I8 => 0,
            Dtype::U8 => 1,
            Dtype::I32 => 2,
            Dtype::U32 => 3,
            Dtype::F16 => 6,
            Dtype::F32 => 7,
            Dtype::BF16 => 9,
            other => {
                let reason = format!("elements of {other} are not reduced");
                return Err(Error::invalid(op, reason));
            }
        };
        let reduce = match reduce {
            ReduceOp::Sum => 0,
            ReduceOp::Max => 2,
            ReduceOp::Min => 3,
        };
        let (from, to) = (at as Address, at as Place);
        self.state.call(op, |library, comm| {
            let stream = stream.raw().cast();
            // SAFETY: the communicator and the stream are held; the caller has memory of the device there, which stays until
            // the stream has come past.
            unsafe { (library.all_reduce)(from, to, len, dtype, reduce, comm, stream) }
        })
    }

    /// Puts `bytes` bytes of each rank side by side at `to`, by rank; they may be in place already.
    pub(super) fn all_gather(
        &self,
        op: &'static str,
        stream: &Stream,
        (from, to): (u64, u64),
        bytes: usize,
    ) -> Result<()> {
        let (from, to) = (from as Address, to as Place);
        self.state.call(op, |library, comm| {
            let stream = stream.raw().cast();
            // SAFETY: as in `all_reduce`.
            unsafe { (library.all_gather)(from, to, bytes, BYTES, comm, stream) }
        })
    }

    /// `bytes` bytes at `at` become those of rank `root`.
    pub(super) fn broadcast(
        &self,
        op: &'static str,
        stream: &Stream,
        (at, bytes): (u64, usize),
        root: usize,
    ) -> Result<()> {
        let (from, to) = (at as Address, at as Place);
        let root = c_int::try_from(root).unwrap_or(c_int::MAX);
        self.state.call(op, |library, comm| {
            let stream = stream.raw().cast();
            // SAFETY: as in `all_reduce`.
            unsafe { (library.broadcast)(from, to, bytes, BYTES, root, comm, stream) }
        })
    }

    /// Waits for the work of a rank that leaves. Where the others never come to it, it is aborted.
    pub(super) fn finish(&self, stream: &Stream) {
        let until = Instant::now() + LEAVE_TIMEOUT;
        let event = Event::new(stream.driver());
        if let Ok(event) = event
            && stream.record(&event).is_ok()
        {
            while !event.is_done() && self.check("close").is_ok() {
                if std::thread::panicking() || Instant::now() > until {
                    return self.state.abort();
                }
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }
}

/// What was captured with the communicator is gone by now.
impl Drop for Communicator {
    fn drop(&mut self) {
        *lock(&self.state.is_leaving) = true;
        self.state.left.notify_all();
        if let Some(watch) = self.watch.take() {
            // It does not panic, and there would be nothing else to do.
            let _ = watch.join();
        }
        self.state.close();
    }
}

impl State {
    /// Makes a call of the library with the communicator.
    fn call(&self, op: &'static str, f: impl FnOnce(&Library, Place) -> c_int) -> Result<()> {
        if self.has_aborted.load(Ordering::Acquire) || self.group.failure().is_some() {
            return Err(self.ended(op));
        }
        self.driver.bind(op)?;
        let code = match *lock(&self.comm) {
            Some(Handle(comm)) => f(self.library, comm),
            None => return Err(self.ended(op)),
        };
        self.settle(op, code)
    }

    /// Waits until a call that gave `code` is done on the host.
    fn settle(&self, op: &'static str, code: c_int) -> Result<()> {
        let mut code = code;
        while code == IN_PROGRESS {
            if self.group.failure().is_some() {
                self.abort();
                return Err(self.ended(op));
            }
            code = self.async_error().ok_or_else(|| self.ended(op))?;
            std::thread::yield_now();
        }
        match code {
            SUCCESS => Ok(()),
            code => Err(self.fail(op, self.words(code))),
        }
    }

    fn words(&self, code: c_int) -> String {
        let comm = lock(&self.comm).map_or(null_mut(), |Handle(comm)| comm);
        self.library.words(code, comm)
    }

    /// What became of calls that were in progress; `None` without a communicator.
    fn async_error(&self) -> Option<c_int> {
        let comm = lock(&self.comm);
        let Handle(comm) = (*comm)?;
        let mut code = SUCCESS;
        // SAFETY: the communicator is held; `code` outlives the call.
        match unsafe { (self.library.async_error)(comm, &mut code) } {
            SUCCESS => Some(code),
            code => Some(code),
        }
    }

    /// Looks after the communicator until its owner leaves.
    fn watch(&self) {
        let mut is_leaving = lock(&self.is_leaving);
        while !*is_leaving {
            let woken = self.left.wait_timeout(is_leaving, WATCH_INTERVAL);
            is_leaving = woken.unwrap_or_else(PoisonError::into_inner).0;
            if *is_leaving {
                break;
            }
            let broken = match self.async_error() {
                Some(SUCCESS | IN_PROGRESS) => None,
                Some(code) => Some(self.words(code)),
                None => return,
            };
            if let Some(reason) = broken {
                self.group.abort(&format!("NCCL says {reason}"));
            }
            if self.group.failure().is_some() {
                drop(is_leaving);
                return self.abort();
            }
        }
    }

    /// Ends the group because a call failed.
    fn fail(&self, op: &'static str, reason: String) -> Error {
        self.group.abort(&format!("NCCL says {reason}"));
        self.abort();
        error(op, reason)
    }

    /// Ends all work of the communicator on the device, finished or not.
    fn abort(&self) {
        // Callers that wait for that work see this first.
        self.has_aborted.store(true, Ordering::Release);
        let comm = lock(&self.comm).take();
        if let Some(Handle(comm)) = comm
            && self.driver.bind("abort").is_ok()
        {
            // SAFETY: the communicator was held, and there is no other handle of it any more.
            unsafe { (self.library.abort)(comm) };
        }
    }

    /// Leaves the communicator together with the other ranks, or without them.
    fn close(&self) {
        let Some(Handle(comm)) = *lock(&self.comm) else {
            return;
        };
        if std::thread::panicking()
            || self.group.failure().is_some()
            || self.driver.bind("close").is_err()
        {
            return self.abort();
        }
        // SAFETY: the communicator is held, and this thread alone uses it by now.
        let mut code = unsafe { (self.library.finalize)(comm) };
        let until = Instant::now() + LEAVE_TIMEOUT;
        while code == IN_PROGRESS && Instant::now() < until && self.group.failure().is_none() {
            std::thread::sleep(Duration::from_micros(200));
            code = self.async_error().unwrap_or(SUCCESS);
        }
        if code != SUCCESS {
            return self.abort();
        }
        lock(&self.comm).take();
        // SAFETY: finalized above, destroyed once.
        unsafe { (self.library.destroy)(comm) };
    }

    /// The error that callers get who wait for a group that has ended, in the words of its transport.
    fn ended(&self, op: &'static str) -> Error {
        let reason = match self.group.failure() {
            Some((rank, why)) => {
                let size = self.group.size();
                format!("rank {rank} of {size} ended the group: {why}")
            }
            None => "the communicator was aborted".into(),
        };
        error(op, reason)
    }
}

fn error(op: &'static str, reason: String) -> Error {
    Error::Device {
        backend: NAME,
        op,
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_connect_that_have_the_library_and_a_device_each() {
        let record = |has_library: bool, device: u8| {
            let mut record = [device; RECORD];
            record[0] = u8::from(has_library);
            record
        };
        let (first, second) = (record(true, 1), record(true, 2));
        assert!(connects(&[&first, &second]));
        assert!(!connects(&[&first, &record(false, 2)]));
        assert!(!connects(&[&first, &second, &first]));
        assert!(!connects(&[&first, &[]]));
        assert!(!connects(&[&first]));
        assert!(!connects(&[]));
    }
}
