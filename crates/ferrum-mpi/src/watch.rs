//! Signs of life, and what becomes of a process whose group has ended.
//!
//! Any thread that has MPI sends and reads the signs when they are due: one that waits in a collective, or the watch,
//! which has nothing else to do. Silence is counted in ticks, so a process that was suspended does not take the others
//! for gone when it goes on.

use crate::calls::{Comm, Transfer};
use crate::group::{Calls, Failure, MpiRank};
use crate::{GRACE, SILENCE};
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Tag of what is beside the collectives.
const CONTROL: c_int = 2;

/// Time between two signs of life.
const TICK: Duration = Duration::from_millis(200);

/// How often the watch looks.
const WATCH: Duration = Duration::from_millis(100);

/// How long the end of a job may take before the process ends itself.
const LAST_RESORT: Duration = Duration::from_millis(500);

/// Kinds of control messages, their first byte. A failure is followed by the rank and the reason.
const ALIVE: u8 = 1;
const FAILED: u8 = 2;
const LEAVING: u8 = 3;

/// Longest reason that is told.
const MAX_REASON: usize = 900;

/// Signs of life, of this rank and of the others.
#[derive(Debug)]
pub(crate) struct Pulse {
    last: Instant,
    /// How long nothing was heard of each rank; `None` for one that has left.
    silence: Vec<Option<Duration>>,
    /// The sign of life on its way to each rank.
    signs: Vec<Transfer>,
    /// Last words: each is sent at most once.
    farewell: [Transfer; 2],
    incoming: Transfer,
    /// Whose message is coming in.
    source: usize,
}

impl Pulse {
    pub(crate) fn new(size: usize) -> Self {
        let mut signs = Vec::new();
        signs.resize_with(size, Transfer::default);
        Self {
            last: Instant::now(),
            silence: vec![Some(Duration::ZERO); size],
            signs,
            farewell: Default::default(),
            incoming: Transfer::default(),
            source: 0,
        }
    }

    /// How long ago the last tick was.
    fn age(&self) -> Duration {
        self.last.elapsed()
    }
}

impl Calls {
    /// Sends and reads signs of life, if it is time.
    pub(crate) fn tick(&mut self, group: &MpiRank) {
        let since = self.pulse.age();
        if since < TICK {
            return;
        }
        self.pulse.last = Instant::now();
        for silence in self.pulse.silence.iter_mut().flatten() {
            *silence += since.min(2 * TICK);
        }
        // What they have said comes before what is to be seen of them: a rank that ends says why.
        self.read_control(group);
        if group.failure_here().is_some() || group.has_left.load(Ordering::Relaxed) {
            return;
        }
        for rank in group.others() {
            let sign = &mut self.pulse.signs[rank];
            // One that has not gone yet says as much as two.
            let sent = match self.comm.is_done(sign) {
                Ok(true) => {
                    put(sign, &[ALIVE]).and_then(|()| self.comm.send(sign, rank, CONTROL).ok())
                }
                Ok(false) | Err(_) => None,
            };
            // A rank that cannot be sent to is soon found silent.
            let _ = sent;
        }
        if let Some(failure) = self.gone(group) {
            group.fail(self, failure);
        }
    }

    /// The first rank that is gone without a word.
    fn gone(&self, group: &MpiRank) -> Option<Failure> {
        let own = &group.peers[group.rank];
        group.others().find_map(|rank| {
            let (silence, peer) = (self.pulse.silence[rank]?, &group.peers[rank]);
            let reason = if peer.is_gone(own) {
                format!("{peer} has ended")
            } else if silence >= SILENCE {
                let seconds = SILENCE.as_secs_f64();
                format!(
                    "nothing was heard of {peer} for {seconds} s: it, its host or the network to it has failed"
                )
            } else {
                return None;
            };
            Some(Failure {
                rank,
                reason,
                told: false,
            })
        })
    }

    /// Reads all control messages that have come.
    fn read_control(&mut self, group: &MpiRank) {
        let Self { comm, pulse } = self;
        // More than come between two ticks: a rank that sends without end does not keep this one here.
        let mut failed = None;
        for _ in 0..64 * group.peers.len() {
            if !pulse.incoming.is_pending() {
                match comm.receive(&mut pulse.incoming, None, CONTROL) {
                    Ok(Some(source)) => pulse.source = source,
                    Ok(None) | Err(_) => break,
                }
            }
            match comm.is_done(&mut pulse.incoming) {
                Ok(true) => {}
                Ok(false) | Err(_) => break,
            }
            let Some(silence) = pulse.silence.get_mut(pulse.source) else {
                continue;
            };
            match pulse.incoming.bytes() {
                [LEAVING, ..] => *silence = None,
                [FAILED, rank, reason @ ..] => {
                    failed.get_or_insert_with(|| Failure {
                        rank: usize::from(*rank).min(group.peers.len() - 1),
                        reason: String::from_utf8_lossy(reason).into_owned(),
                        told: true,
                    });
                }
                _ => *silence = silence.map(|_| Duration::ZERO),
            }
        }
        if let Some(failure) = failed {
            group.fail(self, failure);
        }
    }

    /// Tells all ranks why the group has ended.
    pub(crate) fn tell_failure(&mut self, group: &MpiRank, failure: &Failure) {
        let mut end = failure.reason.len().min(MAX_REASON);
        while !failure.reason.is_char_boundary(end) {
            end -= 1;
        }
        let rank = u8::try_from(failure.rank).unwrap_or(u8::MAX);
        let mut words = vec![FAILED, rank];
        words.extend_from_slice(&failure.reason.as_bytes()[..end]);
        self.say_all(group, 0, &words);
    }

    /// Tells all ranks that this one leaves because everything is done.
    pub(crate) fn tell_leaving(&mut self, group: &MpiRank) {
        self.say_all(group, 1, &[LEAVING]);
    }

    fn say_all(&mut self, group: &MpiRank, which: usize, words: &[u8]) {
        let farewell = &mut self.pulse.farewell[which];
        if put(farewell, words).is_some() {
            for rank in group.others() {
                // Whoever is gone hears nothing.
                let _ = self.comm.send(farewell, rank, CONTROL);
            }
        }
    }

    /// Whether what was said last has gone to everybody.
    pub(crate) fn was_said(&mut self) -> bool {
        let Pulse { farewell, .. } = &mut self.pulse;
        farewell
            .iter_mut()
            .all(|words| self.comm.is_done(words).unwrap_or(true))
    }

    pub(crate) fn comm(&mut self) -> &mut Comm {
        &mut self.comm
    }
}

fn put(transfer: &mut Transfer, words: &[u8]) -> Option<()> {
    transfer.room(words.len())?.copy_from_slice(words);
    Some(())
}

/// Begins to watch over the group, until this rank leaves it.
pub(crate) fn start(group: &Arc<MpiRank>) -> std::io::Result<()> {
    let group = Arc::clone(group);
    let watch = move || {
        let mut failed_since = None;
        let mut held_since = Instant::now();
        while !group.has_left.load(Ordering::Acquire) {
            std::thread::sleep(WATCH);
            if let Some(mut calls) = group.try_calls() {
                calls.tick(&group);
                held_since = Instant::now();
            } else if held_since.elapsed() >= 2 * SILENCE && failed_since.is_none() {
                // MPI does not wait where it is called, unless it has lost its way.
                eprintln!(
                    "error: a call of MPI on rank {} does not return",
                    group.rank
                );
                leave_at_once();
            }
            let Some(failure) = group.failure_here() else {
                continue;
            };
            let since = *failed_since.get_or_insert_with(Instant::now);
            let grace = match group.rank {
                0 => GRACE,
                _ => GRACE + GRACE / 2,
            };
            if since.elapsed() >= grace {
                if !failure.told || group.rank == 0 {
                    eprintln!("error: {}", sentence(&group, &failure));
                }
                end_job(&group);
            }
        }
    };
    let thread = std::thread::Builder::new().name("ranks".into());
    thread.spawn(watch).map(drop)
}

/// What is told of a group that has ended.
pub(crate) fn sentence(group: &MpiRank, failure: &Failure) -> String {
    let (Failure { rank, reason, .. }, size) = (failure, group.peers.len());
    format!("rank {rank} of {size} ended the group: {reason}")
}

/// Ends all processes of the job, or this one where MPI cannot.
pub(crate) fn end_job(group: &MpiRank) -> ! {
    let resort = std::thread::Builder::new().spawn(|| {
        std::thread::sleep(LAST_RESORT);
        leave_at_once();
    });
    if resort.is_err() {
        leave_at_once();
    }
    // The last words get a moment to go out.
    let until = Instant::now() + LAST_RESORT / 5;
    while Instant::now() < until {
        if let Some(mut calls) = group.try_calls()
            && calls.was_said()
        {
            calls.comm().abort();
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    group.calls().comm().abort();
    leave_at_once()
}

/// Ends this process without MPI's own end, which waits for ranks that are gone.
fn leave_at_once() -> ! {
    // SAFETY: it takes a number and returns nothing; no destructor has to run in a process whose group has ended.
    unsafe { libc::_exit(1) }
}
