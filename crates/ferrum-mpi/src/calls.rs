//! The raw calls of MPI. None of them blocks.
//!
//! The safe requests of the `mpi` crate belong to a scope that waits for their completion, and requests to a dead rank
//! never complete. So raw calls are made here, and nowhere else. A [`Transfer`] owns the memory that MPI reads or writes,
//! and neither lends nor frees it before MPI has completed its requests.

use mpi::ffi;
use std::ffi::c_int;
use std::mem::MaybeUninit;

/// A communicator that only this process's group uses. Every call takes `&mut self`, so threads call MPI one at a time.
#[derive(Debug)]
pub(crate) struct Comm(ffi::MPI_Comm);

// SAFETY: a handle, which any thread may use: MPI is initialised with MPI_THREAD_SERIALIZED or more (`World::join`
// checks that), and `&mut self` makes the calls one at a time.
unsafe impl Send for Comm {}

/// The buffer of a message that is sent to other ranks or received from one.
#[derive(Debug, Default)]
pub(crate) struct Transfer {
    /// Aligned for every element.
    words: Vec<u64>,
    bytes: usize,
    /// Requests that MPI has not completed.
    requests: Vec<ffi::MPI_Request>,
}

// SAFETY: requests are handles as communicators are, and the memory is owned.
unsafe impl Send for Transfer {}

impl Transfer {
    /// Whether MPI may access the memory.
    pub(crate) fn is_pending(&self) -> bool {
        !self.requests.is_empty()
    }

    /// A buffer of `bytes` bytes with unspecified contents; `None` while MPI may access it.
    pub(crate) fn buffer_mut(&mut self, bytes: usize) -> Option<&mut [u8]> {
        if self.is_pending() {
            return None;
        }
        let words = bytes.div_ceil(size_of::<u64>());
        if self.words.len() < words {
            self.words.resize(words, 0);
        }
        self.bytes = bytes;
        Some(&mut bytemuck::cast_slice_mut(&mut self.words)[..bytes])
    }

    /// The contents. Must not be called while the transfer is being received.
    pub(crate) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.bytes]
    }
}

/// Leaks memory of requests that are not complete, since MPI may still access it.
impl Drop for Transfer {
    fn drop(&mut self) {
        if self.is_pending() {
            std::mem::forget(std::mem::take(&mut self.words));
        }
    }
}

/// A call that failed.
#[derive(Debug)]
pub(crate) struct CallError(String);

impl std::fmt::Display for CallError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

type Result<T> = std::result::Result<T, CallError>;

impl Comm {
    /// Wraps a communicator and makes its calls return errors instead of aborting.
    ///
    /// # Errors
    /// The error of MPI.
    pub(crate) fn new(raw: ffi::MPI_Comm) -> Result<Self> {
        // SAFETY: the communicator is live (a duplicate that is never freed), and the handler is a constant of MPI.
        let code = unsafe { ffi::MPI_Comm_set_errhandler(raw, ffi::RSMPI_ERRORS_RETURN) };
        check("MPI_Comm_set_errhandler", code)?;
        Ok(Self(raw))
    }

    /// Starts to send a transfer to a rank. A transfer may be sent to several ranks at once.
    ///
    /// # Errors
    /// The error of MPI; a message of more bytes than a C `int` counts.
    pub(crate) fn send(&mut self, transfer: &mut Transfer, to: usize, tag: c_int) -> Result<()> {
        let count = count(transfer.bytes)?;
        let mut request = MaybeUninit::uninit();
        // SAFETY: the memory has `count` bytes, is owned by the transfer and is neither moved, written nor freed before
        // its requests are complete: `buffer_mut` refuses, and dropping it leaks.
        let code = unsafe {
            ffi::MPI_Isend(
                transfer.words.as_ptr().cast(),
                count,
                ffi::RSMPI_UINT8_T,
                to as c_int,
                tag,
                self.0,
                request.as_mut_ptr(),
            )
        };
        check("MPI_Isend", code)?;
        // SAFETY: a call that succeeds has written the request.
        transfer.requests.push(unsafe { request.assume_init() });
        Ok(())
    }

    /// Starts to receive the next message with a tag, from one rank or from any, and returns its sender; `None` if no
    /// message has arrived. The transfer must not be pending.
    ///
    /// # Errors
    /// The error of MPI; a transfer that is pending.
    pub(crate) fn receive(
        &mut self,
        transfer: &mut Transfer,
        from: Option<usize>,
        tag: c_int,
    ) -> Result<Option<usize>> {
        // SAFETY: a constant of MPI.
        let any = unsafe { ffi::RSMPI_ANY_SOURCE };
        let from = from.map_or(any, |rank| rank as c_int);
        let (mut found, mut message) = (0, MaybeUninit::uninit());
        let mut status = MaybeUninit::<ffi::MPI_Status>::uninit();
        // SAFETY: all pointers are to memory of the type that is written.
        let code = unsafe {
            ffi::MPI_Improbe(
                from,
                tag,
                self.0,
                &mut found,
                message.as_mut_ptr(),
                status.as_mut_ptr(),
            )
        };
        check("MPI_Improbe", code)?;
        if found == 0 {
            return Ok(None);
        }
        // SAFETY: a probe that found a message has written it and its status.
        let (mut message, status) = unsafe { (message.assume_init(), status.assume_init()) };
        let mut bytes = 0;
        // SAFETY: the status is that of a message.
        let code = unsafe { ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut bytes) };
        check("MPI_Get_count", code)?;
        let len = usize::try_from(bytes).unwrap_or(0);
        let Some(buffer) = transfer.buffer_mut(len) else {
            return Err(CallError("the buffer of a message is still in use".into()));
        };
        let mut request = MaybeUninit::uninit();
        // SAFETY: the buffer has as many bytes as the message, and stays as it is until the request is complete, as for
        // `send`.
        let code = unsafe {
            ffi::MPI_Imrecv(
                buffer.as_mut_ptr().cast(),
                bytes,
                ffi::RSMPI_UINT8_T,
                &mut message,
                request.as_mut_ptr(),
            )
        };
        check("MPI_Imrecv", code)?;
        // SAFETY: a call that succeeds has written the request.
        transfer.requests.push(unsafe { request.assume_init() });
        Ok(Some(usize::try_from(status.MPI_SOURCE).unwrap_or(0)))
    }

    /// Whether MPI has completed a transfer.
    ///
    /// # Errors
    /// The error of MPI.
    pub(crate) fn is_done(&mut self, transfer: &mut Transfer) -> Result<bool> {
        let mut failed = Ok(());
        transfer.requests.retain_mut(|request| {
            let mut done = 0;
            // SAFETY: the request is one that MPI gave and has not completed.
            let code = unsafe { ffi::MPI_Test(request, &mut done, ffi::RSMPI_STATUS_IGNORE) };
            if let Err(error) = check("MPI_Test", code) {
                failed = Err(error);
            }
            done == 0
        });
        failed?;
        Ok(!transfer.is_pending())
    }

    /// Calls `MPI_Abort`, which ends all processes of the job and usually does not return.
    pub(crate) fn abort(&mut self) {
        // SAFETY: the communicator is live.
        unsafe { ffi::MPI_Abort(self.0, 1) };
    }
}

fn count(bytes: usize) -> Result<c_int> {
    c_int::try_from(bytes).map_err(|_| {
        CallError(format!(
            "a message of {bytes} bytes is longer than MPI can count"
        ))
    })
}

fn check(call: &str, code: c_int) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    // MPI_MAX_ERROR_STRING is 256 in Open MPI and 512 in MPICH.
    let (mut text, mut len) = ([0u8; 1024], 0);
    // SAFETY: the text has more room than any implementation asks for, and is one of bytes.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut len) };
    let len = usize::try_from(len).unwrap_or(0).min(text.len());
    let text = String::from_utf8_lossy(&text[..len]);
    Err(CallError(format!("{call}: {text}")))
}
