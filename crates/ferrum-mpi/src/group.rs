//! [`MpiRank`]: one rank's end of a group of processes.
//!
//! A collective is a message from each rank to every other one: what it was called with, then its part. So all parts
//! are on every rank, which combines them in rank order as the ranks of a local group do: the same bits. For the few
//! kilobytes of a decode step that is also the fastest form, one latency instead of two.

use crate::calls::{CallError, Comm, Transfer};
use crate::peer::Peer;
use crate::watch::Pulse;
use ferrum_kernels::{GroupCall, GroupTransport};
use ferrum_types::{Error, Result};
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What messages call this transport.
const NAME: &str = "mpi";

/// Tag of the parts of collectives.
const DATA: c_int = 1;

/// Bytes before a part: the turn, the call.
const HEADER: usize = 48;

/// How long a rank that waits asks again at once, and how long it then sleeps between two looks: a decode step takes
/// milliseconds, and nobody waits for an idle server.
const KEEN: Duration = Duration::from_millis(2);
const NAPS: [(Duration, Duration); 3] = [
    (Duration::from_millis(50), Duration::from_micros(50)),
    (Duration::from_secs(2), Duration::from_micros(300)),
    (Duration::MAX, Duration::from_millis(2)),
];

/// Why a group has ended.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) rank: usize,
    pub(crate) reason: String,
    /// Whether another rank has said so, and this one has not found out by itself.
    pub(crate) told: bool,
}

/// What all threads of this process know of the group.
#[derive(Debug)]
pub(crate) struct MpiRank {
    pub(crate) rank: usize,
    pub(crate) peers: Vec<Peer>,
    calls: Mutex<Calls>,
    collective: Mutex<Collective>,
    failure: Mutex<Option<Failure>>,
    has_failed: AtomicBool,
    /// Whether this rank has left on purpose.
    pub(crate) has_left: AtomicBool,
}

/// What is only to be had by one thread at a time: MPI, and the signs of life that go through it.
#[derive(Debug)]
pub(crate) struct Calls {
    pub(crate) comm: Comm,
    pub(crate) pulse: Pulse,
}

/// The collective that this rank is in.
#[derive(Debug)]
struct Collective {
    /// Collectives before it.
    turn: u64,
    /// What this rank sends, in even and in odd turns: a message may still be read when the next one is written.
    own: [Transfer; 2],
    /// What the others sent, by rank.
    parts: Vec<Transfer>,
    arrivals: Vec<Arrival>,
    /// What this rank has called, as the others have to.
    header: [u8; HEADER],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arrival {
    Awaited,
    Arriving,
    Here,
}

impl MpiRank {
    pub(crate) fn new(comm: Comm, rank: usize, peers: Vec<Peer>) -> Self {
        let size = peers.len();
        let mut parts = Vec::new();
        parts.resize_with(size, Transfer::default);
        Self {
            rank,
            calls: Mutex::new(Calls {
                comm,
                pulse: Pulse::new(size),
            }),
            collective: Mutex::new(Collective {
                turn: 0,
                own: Default::default(),
                parts,
                arrivals: vec![Arrival::Awaited; size],
                header: [0; HEADER],
            }),
            failure: Mutex::default(),
            has_failed: AtomicBool::new(false),
            has_left: AtomicBool::new(false),
            peers,
        }
    }

    /// A thread that panicked with the lock held left MPI as it was between two calls.
    pub(crate) fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// MPI, where no other thread has it.
    pub(crate) fn try_calls(&self) -> Option<MutexGuard<'_, Calls>> {
        self.calls.try_lock().ok()
    }

    pub(crate) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.rank;
        (0..self.peers.len()).filter(move |&rank| rank != own)
    }

    pub(crate) fn failure_here(&self) -> Option<Failure> {
        match self.has_failed.load(Ordering::Acquire) {
            true => self.failures().clone(),
            false => None,
        }
    }

    fn failures(&self) -> MutexGuard<'_, Option<Failure>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the group, and tells the others why. The first reason counts.
    pub(crate) fn fail(&self, calls: &mut Calls, failure: Failure) {
        {
            let mut first = self.failures();
            if first.is_some() {
                return;
            }
            *first = Some(failure.clone());
            self.has_failed.store(true, Ordering::Release);
        }
        // Whoever was told need not tell: the rank that found out tells everybody.
        if !failure.told {
            calls.tell_failure(self, &failure);
        }
    }

    /// The error of a collective of a group that has ended.
    fn ended(&self, op: &'static str) -> Option<Error> {
        let Failure { rank, reason, .. } = self.failure_here()?;
        let size = self.peers.len();
        Some(Error::Device {
            backend: NAME,
            op,
            reason: format!("rank {rank} of {size} ended the group: {reason}"),
        })
    }

    /// Ends the group when `result` is an error.
    fn or_abort(&self, result: Result<()>) -> Result<()> {
        if let Err(error) = &result {
            self.abort(&error.to_string());
        }
        result
    }

    /// Looks at MPI until `is_done`, or until the group has ended.
    fn wait(
        &self,
        op: &'static str,
        mut is_done: impl FnMut(&mut Comm) -> Result<bool, CallError>,
    ) -> Result<()> {
        let mut waiting_since = None;
        loop {
            if let Some(error) = self.ended(op) {
                return Err(error);
            }
            {
                let mut calls = self.calls();
                match is_done(&mut calls.comm) {
                    Ok(true) => return Ok(()),
                    Ok(false) => {}
                    Err(error) => {
                        let failure = Failure {
                            rank: self.rank,
                            reason: error.to_string(),
                            told: false,
                        };
                        self.fail(&mut calls, failure);
                        continue;
                    }
                }
                calls.tick(self);
            }
            let waited = waiting_since.get_or_insert_with(Instant::now).elapsed();
            match NAPS.iter().find(|(until, _)| waited < *until) {
                Some((_, nap)) if waited >= KEEN => std::thread::sleep(*nap),
                // Ranks may be more than cores.
                _ => std::thread::yield_now(),
            }
        }
    }

    fn post_part(
        &self,
        call: GroupCall,
        bytes: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let mut collective = self.collective();
        let Collective {
            turn, own, header, ..
        } = &mut *collective;
        let own = &mut own[(*turn % 2) as usize];
        *header = header_of(*turn, call);
        self.wait(call.op, |comm| comm.is_done(own))?;
        let room = own.room(HEADER + bytes);
        let room = room.ok_or_else(|| Error::invalid(NAME, "a part is being sent"))?;
        room[..HEADER].copy_from_slice(header);
        self.or_abort(fill(&mut room[HEADER..]))?;
        let mut calls = self.calls();
        for rank in self.others() {
            if let Err(error) = calls.comm.send(own, rank, DATA) {
                let failure = Failure {
                    rank: self.rank,
                    reason: error.to_string(),
                    told: false,
                };
                self.fail(&mut calls, failure);
            }
        }
        drop(calls);
        self.ended(call.op).map_or(Ok(()), Err)
    }

    fn collective(&self) -> MutexGuard<'_, Collective> {
        let collective = self.collective.lock();
        collective.unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collective {
    /// Receives what has come of the other ranks' parts; whether all are here.
    fn receive(
        &mut self,
        comm: &mut Comm,
        others: impl Iterator<Item = usize>,
    ) -> Result<bool, CallError> {
        let mut all = true;
        for rank in others {
            let (part, arrival) = (&mut self.parts[rank], &mut self.arrivals[rank]);
            // A rank's messages come in the order of its turns.
            if *arrival == Arrival::Awaited && comm.receive(part, Some(rank), DATA)?.is_some() {
                *arrival = Arrival::Arriving;
            }
            if *arrival == Arrival::Arriving && comm.is_done(part)? {
                *arrival = Arrival::Here;
            }
            all &= *arrival == Arrival::Here;
        }
        Ok(all)
    }

    /// The first rank that is in another collective, and what it says that is.
    fn stranger(&self, others: impl Iterator<Item = usize>) -> Option<(usize, String)> {
        let mut others = others.map(|rank| (rank, self.parts[rank].bytes()));
        let (rank, bytes) = others.find(|(_, bytes)| bytes.get(..HEADER) != Some(&self.header))?;
        Some((rank, describe(bytes.get(..HEADER).unwrap_or_default())))
    }
}

fn header_of(turn: u64, call: GroupCall) -> [u8; HEADER] {
    let GroupCall {
        op,
        dtype,
        len,
        detail,
    } = call;
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(&turn.to_le_bytes());
    for (place, text) in [(8..24, op), (24..32, dtype.name())] {
        for (place, byte) in header[place].iter_mut().zip(text.bytes()) {
            *place = byte;
        }
    }
    header[32..40].copy_from_slice(&(len as u64).to_le_bytes());
    header[40..].copy_from_slice(&(detail as u64).to_le_bytes());
    header
}

fn describe(header: &[u8]) -> String {
    let Ok(header) = <&[u8; HEADER]>::try_from(header) else {
        return "nothing that a rank sends".into();
    };
    let number = |first: usize| {
        let (numbers, _) = header.as_chunks();
        u64::from_le_bytes(numbers[first / 8])
    };
    let text = |range: std::ops::Range<usize>| {
        let text = String::from_utf8_lossy(&header[range]).into_owned();
        text.trim_end_matches('\0').to_owned()
    };
    format!(
        "{} of {} {} ({}), turn {}",
        text(8..24),
        number(32),
        text(24..32),
        number(40),
        number(0)
    )
}

impl GroupTransport for MpiRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.peers.len()
    }

    fn post(
        &self,
        call: GroupCall,
        bytes: usize,
        fill: &mut dyn FnMut(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        match self.ended(call.op) {
            Some(error) => Err(error),
            None => self.post_part(call, bytes, fill),
        }
    }

    fn gather(&self, take: &mut dyn FnMut(&[&[u8]]) -> Result<()>) -> Result<()> {
        let mut collective = self.collective();
        self.wait("gather", |comm| collective.receive(comm, self.others()))?;
        if let Some((rank, found)) = collective.stranger(self.others()) {
            let expected = describe(&collective.header);
            let reason = format!("is in {expected} and rank {rank} in {found}");
            self.abort(&reason);
            return Err(self.ended("gather").unwrap_or(Error::invalid(NAME, reason)));
        }
        let own = &collective.own[(collective.turn % 2) as usize];
        let parts: Vec<&[u8]> = (0..collective.parts.len())
            .map(|rank| {
                let all = if rank == self.rank {
                    own
                } else {
                    &collective.parts[rank]
                };
                &all.bytes()[HEADER..]
            })
            .collect();
        let taken = take(&parts);
        collective.turn += 1;
        collective.arrivals.fill(Arrival::Awaited);
        drop(collective);
        self.or_abort(taken)
    }

    fn abort(&self, reason: &str) {
        let failure = Failure {
            rank: self.rank,
            reason: reason.to_owned(),
            told: false,
        };
        self.fail(&mut self.calls(), failure);
    }

    fn failure(&self) -> Option<(usize, String)> {
        let Failure { rank, reason, .. } = self.failure_here()?;
        Some((rank, reason))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrum_types::Dtype;

    #[test]
    fn a_call_can_be_read_from_its_header() {
        let call = GroupCall {
            op: "all_gather",
            dtype: Dtype::BF16,
            len: 4096,
            detail: 3,
        };
        let header = header_of(7, call);
        assert_eq!(describe(&header), "all_gather of 4096 bf16 (3), turn 7");
        assert_eq!(describe(&header[1..]), "nothing that a rank sends");
        let long = GroupCall {
            op: "a name of more than sixteen",
            ..call
        };
        assert!(describe(&header_of(0, long)).starts_with("a name of more t of 4096"));
    }
}
