//! Heartbeats between ranks, failure detection, and termination of a process whose group has failed.
//!
//! Any thread that holds the lock on MPI sends and reads heartbeats when they are due: a thread that waits in a
//! collective, or the monitor thread of this module. The time without a heartbeat is counted in intervals, not by the
//! clock, so a process that was suspended does not declare the other ranks dead when it resumes.

use crate::calls::{Comm, Transfer};
use crate::state::{Failure, MpiRank, MpiState};
use crate::{HEARTBEAT_TIMEOUT, SHUTDOWN_GRACE};
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Tag of control messages, which are independent of the collectives.
const CONTROL: c_int = 2;

/// Time between two heartbeats.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(200);

/// Time between two checks of the monitor thread.
const MONITOR_INTERVAL: Duration = Duration::from_millis(100);

/// How long `MPI_Abort` may take before the process exits without it.
const ABORT_TIMEOUT: Duration = Duration::from_millis(500);

/// Kinds of control messages: their first byte. A failure is followed by the rank and the reason.
const HEARTBEAT: u8 = 1;
const FAILED: u8 = 2;
const LEAVING: u8 = 3;

/// Longest reason in a failure message, in bytes.
const MAX_REASON: usize = 900;

/// Indices of the notices in [`Heartbeats`].
const FAILURE_NOTICE: usize = 0;
const LEAVE_NOTICE: usize = 1;

impl MpiState {
    /// Sends and reads heartbeats if they are due, and ends the group if a rank is dead.
    pub(crate) fn exchange_heartbeats(&mut self, group: &MpiRank) {
        let elapsed = self.heartbeats.last_sent.elapsed();
        // `World::end` sets `has_left` before it takes the lock to finalise MPI, which then accepts no more calls.
        if elapsed < HEARTBEAT_INTERVAL || group.has_left.load(Ordering::Acquire) {
            return;
        }
        self.heartbeats.last_sent = Instant::now();
        for silent_for in self.heartbeats.silent_for.iter_mut().flatten() {
            *silent_for += elapsed.min(2 * HEARTBEAT_INTERVAL);
        }
        // Messages are read before processes are checked: a rank that ends sends its reason first.
        self.read_control(group);
        if group.failure().is_some() {
            return;
        }
        for rank in group.others() {
            let heartbeat = &mut self.heartbeats.outgoing[rank];
            // While the last heartbeat is still being sent, another one adds nothing.
            if let Ok(true) = self.comm.is_done(heartbeat)
                && write(heartbeat, &[HEARTBEAT]).is_some()
            {
                // A rank that cannot be reached times out.
                let _ = self.comm.send(heartbeat, rank, CONTROL);
            }
        }
        if let Some(failure) = self.find_dead_rank(group) {
            group.fail(self, failure);
        }
    }

    /// The first rank whose process has ended, or whose heartbeats have timed out.
    fn find_dead_rank(&self, group: &MpiRank) -> Option<Failure> {
        let own = &group.peers[group.rank];
        group.others().find_map(|rank| {
            let silent_for = self.heartbeats.silent_for[rank]?;
            let peer = &group.peers[rank];
            let reason = if peer.is_gone(own) {
                format!("{peer} has ended")
            } else if silent_for >= HEARTBEAT_TIMEOUT {
                let seconds = HEARTBEAT_TIMEOUT.as_secs_f64();
                format!(
                    "no heartbeat of {peer} for {seconds} s: it, its host or the network to it has failed"
                )
            } else {
                return None;
            };
            Some(Failure {
                rank,
                reason,
                from_peer: false,
            })
        })
    }

    /// Reads the control messages that have arrived.
    fn read_control(&mut self, group: &MpiRank) {
        let Self { comm, heartbeats } = self;
        let mut failed = None;
        // More than arrive in an interval. The bound keeps a rank that sends without end from holding this one here.
        for _ in 0..64 * group.peers.len() {
            if !heartbeats.incoming.is_pending() {
                match comm.receive(&mut heartbeats.incoming, None, CONTROL) {
                    Ok(Some(source)) => heartbeats.source = source,
                    Ok(None) | Err(_) => break,
                }
            }
            match comm.is_done(&mut heartbeats.incoming) {
                Ok(true) => {}
                Ok(false) | Err(_) => break,
            }
            let Some(silent_for) = heartbeats.silent_for.get_mut(heartbeats.source) else {
                continue;
            };
            match heartbeats.incoming.bytes() {
                [LEAVING, ..] => *silent_for = None,
                [FAILED, rank, reason @ ..] => {
                    failed.get_or_insert_with(|| Failure {
                        rank: usize::from(*rank).min(group.peers.len() - 1),
                        reason: String::from_utf8_lossy(reason).into_owned(),
                        from_peer: true,
                    });
                }
                _ => *silent_for = silent_for.map(|_| Duration::ZERO),
            }
        }
        if let Some(failure) = failed {
            group.fail(self, failure);
        }
    }

    /// Sends the reason of the group's failure to all other ranks.
    pub(crate) fn broadcast_failure(&mut self, group: &MpiRank, failure: &Failure) {
        let mut end = failure.reason.len().min(MAX_REASON);
        while !failure.reason.is_char_boundary(end) {
            end -= 1;
        }
        let rank = u8::try_from(failure.rank).unwrap_or(u8::MAX);
        let mut message = vec![FAILED, rank];
        message.extend_from_slice(&failure.reason.as_bytes()[..end]);
        self.broadcast_notice(group, FAILURE_NOTICE, &message);
    }

    /// Tells all other ranks that this one leaves because the work is done.
    pub(crate) fn broadcast_leave(&mut self, group: &MpiRank) {
        self.broadcast_notice(group, LEAVE_NOTICE, &[LEAVING]);
    }

    fn broadcast_notice(&mut self, group: &MpiRank, notice: usize, message: &[u8]) {
        let notice = &mut self.heartbeats.notices[notice];
        if write(notice, message).is_some() {
            for rank in group.others() {
                // Ranks that are dead do not receive it.
                let _ = self.comm.send(notice, rank, CONTROL);
            }
        }
    }

    /// Whether MPI has sent all notices.
    pub(crate) fn notices_sent(&mut self) -> bool {
        let Self { comm, heartbeats } = self;
        let mut notices = heartbeats.notices.iter_mut();
        notices.all(|notice| comm.is_done(notice).unwrap_or(true))
    }

    pub(crate) fn comm(&mut self) -> &mut Comm {
        &mut self.comm
    }
}

/// Puts a message into a transfer; `None` while the last one is being sent.
fn write(transfer: &mut Transfer, message: &[u8]) -> Option<()> {
    transfer.buffer_mut(message.len())?.copy_from_slice(message);
    Some(())
}

/// Starts the monitor thread, which runs until this rank leaves the group.
pub(crate) fn start_monitor(group: &Arc<MpiRank>) -> std::io::Result<()> {
    let group = Arc::clone(group);
    let monitor = move || {
        let mut failed_since = None;
        let mut lock_taken_since = Instant::now();
        while !group.has_left.load(Ordering::Acquire) {
            std::thread::sleep(MONITOR_INTERVAL);
            if let Some(mut mpi) = group.try_mpi() {
                mpi.exchange_heartbeats(&group);
                lock_taken_since = Instant::now();
            } else if lock_taken_since.elapsed() >= 2 * HEARTBEAT_TIMEOUT && failed_since.is_none()
            {
                // Only non-blocking calls are made under the lock, so MPI itself hangs.
                eprintln!(
                    "error: a call of MPI on rank {} does not return",
                    group.rank
                );
                exit_process();
            }
            let Some(failure) = group.failure() else {
                continue;
            };
            let since = *failed_since.get_or_insert_with(Instant::now);
            let grace = match group.rank {
                0 => SHUTDOWN_GRACE,
                _ => SHUTDOWN_GRACE + SHUTDOWN_GRACE / 2,
            };
            if since.elapsed() >= grace {
                if !failure.from_peer || group.rank == 0 {
                    eprintln!("error: {}", failure_message(&group, &failure));
                }
                abort_job(&group);
            }
        }
    };
    let thread = std::thread::Builder::new().name("rank monitor".into());
    thread.spawn(monitor).map(drop)
}

/// The error message of a group that has failed.
pub(crate) fn failure_message(group: &MpiRank, failure: &Failure) -> String {
    let (Failure { rank, reason, .. }, size) = (failure, group.peers.len());
    format!("rank {rank} of {size} ended the group: {reason}")
}

/// Ends all processes of the job, or this one where MPI cannot.
pub(crate) fn abort_job(group: &MpiRank) -> ! {
    let timeout = std::thread::Builder::new().spawn(|| {
        std::thread::sleep(ABORT_TIMEOUT);
        exit_process();
    });
    if timeout.is_err() {
        exit_process();
    }
    // Gives the notices a moment to be sent.
    let until = Instant::now() + ABORT_TIMEOUT / 5;
    while Instant::now() < until {
        if let Some(mut mpi) = group.try_mpi()
            && mpi.notices_sent()
        {
            mpi.comm().abort();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    group.mpi().comm().abort();
    exit_process()
}

/// Exits without `MPI_Finalize`, which waits for ranks that are dead.
fn exit_process() -> ! {
    // SAFETY: it takes a number and returns nothing; no destructor has to run in a process whose group has failed.
    unsafe { libc::_exit(1) }
}
