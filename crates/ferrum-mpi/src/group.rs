//! [`MpiRank`]: one rank's end of a group of processes.
//!
//! In a collective, each rank sends one message to every other rank: a header that describes the call, then its part.
//! Every rank receives all parts and combines them in rank order, as the ranks of a local group do, so the bits are the
//! same. For the few kilobytes of a decode step this is also the fastest algorithm: one latency instead of two.

use crate::calls::{CallError, Comm, Transfer};
use crate::heartbeat::Heartbeats;
use crate::peer::Peer;
use ferrum_kernels::{GroupCall, GroupTransport};
use ferrum_types::{Error, Result};
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The name of this transport in error messages.
const NAME: &str = "mpi";

/// Tag of messages of collectives.
const DATA: c_int = 1;

/// Bytes of the header before a part: sequence number and call.
const HEADER: usize = 48;

/// How long a rank that waits polls without sleeping. A decode step takes milliseconds.
const SPIN_TIME: Duration = Duration::from_millis(2);

/// Back-off after that: up to each waiting time, the sleep between two polls. Longer sleeps save the cores of an idle
/// server.
const BACKOFF: [(Duration, Duration); 3] = [
    (Duration::from_millis(50), Duration::from_micros(50)),
    (Duration::from_secs(2), Duration::from_micros(300)),
    (Duration::MAX, Duration::from_millis(2)),
];

/// Why a group has failed.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) rank: usize,
    pub(crate) reason: String,
    /// Whether another rank has reported it; this one did not detect it.
    pub(crate) from_peer: bool,
}

/// The state of the group that all threads of this process share.
#[derive(Debug)]
pub(crate) struct MpiRank {
    pub(crate) rank: usize,
    pub(crate) peers: Vec<Peer>,
    calls: Mutex<Calls>,
    collective: Mutex<Collective>,
    failure: Mutex<Option<Failure>>,
    has_failed: AtomicBool,
    /// Whether this rank has left after its work was done.
    pub(crate) has_left: AtomicBool,
}

/// State that one thread uses at a time: MPI, and the heartbeats that are sent through it.
#[derive(Debug)]
pub(crate) struct Calls {
    pub(crate) comm: Comm,
    pub(crate) heartbeats: Heartbeats,
}

/// The collective in progress.
#[derive(Debug)]
struct Collective {
    /// Its sequence number.
    sequence: u64,
    /// Outgoing messages of even and of odd sequence numbers: one may still be read while the next one is written.
    own: [Transfer; 2],
    /// Messages of the other ranks, by rank.
    parts: Vec<Transfer>,
    arrivals: Vec<Arrival>,
    /// The header of this rank's call. Those of the other ranks have to be equal.
    header: [u8; HEADER],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arrival {
    Pending,
    Receiving,
    Received,
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
                heartbeats: Heartbeats::new(size),
            }),
            collective: Mutex::new(Collective {
                sequence: 0,
                own: Default::default(),
                parts,
                arrivals: vec![Arrival::Pending; size],
                header: [0; HEADER],
            }),
            failure: Mutex::default(),
            has_failed: AtomicBool::new(false),
            has_left: AtomicBool::new(false),
            peers,
        }
    }

    /// Locks MPI. A lock is poisoned between two calls only, so the state is valid.
    pub(crate) fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks MPI unless another thread holds the lock.
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

    /// Marks the group as failed and reports it to the other ranks. The first failure counts.
    pub(crate) fn fail(&self, calls: &mut Calls, failure: Failure) {
        {
            let mut first = self.failures();
            if first.is_some() {
                return;
            }
            *first = Some(failure.clone());
            self.has_failed.store(true, Ordering::Release);
        }
        // The rank that detects a failure reports it to all others.
        if !failure.from_peer {
            calls.broadcast_failure(self, &failure);
        }
    }

    /// The error of a collective in a group that has failed.
    fn failure_error(&self, op: &'static str) -> Option<Error> {
        let Failure { rank, reason, .. } = self.failure_here()?;
        let size = self.peers.len();
        Some(Error::Device {
            backend: NAME,
            op,
            reason: format!("rank {rank} of {size} ended the group: {reason}"),
        })
    }

    /// Fails the group when `result` is an error.
    fn fail_group_on_error(&self, result: Result<()>) -> Result<()> {
        if let Err(error) = &result {
            self.abort(&error.to_string());
        }
        result
    }

    /// Polls MPI until `is_done`, or until the group has failed.
    fn wait(
        &self,
        op: &'static str,
        mut is_done: impl FnMut(&mut Comm) -> Result<bool, CallError>,
    ) -> Result<()> {
        let mut waiting_since = None;
        loop {
            if let Some(error) = self.failure_error(op) {
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
                            from_peer: false,
                        };
                        self.fail(&mut calls, failure);
                        continue;
                    }
                }
                calls.exchange_heartbeats(self);
            }
            let waited = waiting_since.get_or_insert_with(Instant::now).elapsed();
            match BACKOFF.iter().find(|(until, _)| waited < *until) {
                Some((_, sleep)) if waited >= SPIN_TIME => std::thread::sleep(*sleep),
                // There may be more ranks than cores.
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
            sequence,
            own,
            header,
            ..
        } = &mut *collective;
        let own = &mut own[(*sequence % 2) as usize];
        *header = header_of(*sequence, call);
        self.wait(call.op, |comm| comm.is_done(own))?;
        let room = own.room(HEADER + bytes);
        let room = room.ok_or_else(|| Error::invalid(NAME, "a part is being sent"))?;
        room[..HEADER].copy_from_slice(header);
        self.fail_group_on_error(fill(&mut room[HEADER..]))?;
        let mut calls = self.calls();
        for rank in self.others() {
            if let Err(error) = calls.comm.send(own, rank, DATA) {
                let failure = Failure {
                    rank: self.rank,
                    reason: error.to_string(),
                    from_peer: false,
                };
                self.fail(&mut calls, failure);
            }
        }
        drop(calls);
        self.failure_error(call.op).map_or(Ok(()), Err)
    }

    fn collective(&self) -> MutexGuard<'_, Collective> {
        let collective = self.collective.lock();
        collective.unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collective {
    /// Receives parts that have arrived; returns whether all are received.
    fn receive(
        &mut self,
        comm: &mut Comm,
        others: impl Iterator<Item = usize>,
    ) -> Result<bool, CallError> {
        let mut all = true;
        for rank in others {
            let (part, arrival) = (&mut self.parts[rank], &mut self.arrivals[rank]);
            // Messages of a rank arrive in the order in which it sent them.
            if *arrival == Arrival::Pending && comm.receive(part, Some(rank), DATA)?.is_some() {
                *arrival = Arrival::Receiving;
            }
            if *arrival == Arrival::Receiving && comm.is_done(part)? {
                *arrival = Arrival::Received;
            }
            all &= *arrival == Arrival::Received;
        }
        Ok(all)
    }

    /// The first rank whose call differs from this rank's, and a description of its call.
    fn find_mismatch(&self, others: impl Iterator<Item = usize>) -> Option<(usize, String)> {
        let mut others = others.map(|rank| (rank, self.parts[rank].bytes()));
        let (rank, bytes) = others.find(|(_, bytes)| bytes.get(..HEADER) != Some(&self.header))?;
        Some((rank, describe(bytes.get(..HEADER).unwrap_or_default())))
    }
}

fn header_of(sequence: u64, call: GroupCall) -> [u8; HEADER] {
    let GroupCall {
        op,
        dtype,
        len,
        detail,
    } = call;
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(&sequence.to_le_bytes());
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
        return "a message without a header".into();
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
        "{} of {} {} ({}), sequence number {}",
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
        match self.failure_error(call.op) {
            Some(error) => Err(error),
            None => self.post_part(call, bytes, fill),
        }
    }

    fn gather(&self, take: &mut dyn FnMut(&[&[u8]]) -> Result<()>) -> Result<()> {
        let mut collective = self.collective();
        self.wait("gather", |comm| collective.receive(comm, self.others()))?;
        if let Some((rank, found)) = collective.find_mismatch(self.others()) {
            let expected = describe(&collective.header);
            let reason = format!("calls {expected}, but rank {rank} calls {found}");
            self.abort(&reason);
            return Err(self
                .failure_error("gather")
                .unwrap_or(Error::invalid(NAME, reason)));
        }
        let own = &collective.own[(collective.sequence % 2) as usize];
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
        collective.sequence += 1;
        collective.arrivals.fill(Arrival::Pending);
        drop(collective);
        self.fail_group_on_error(taken)
    }

    fn abort(&self, reason: &str) {
        let failure = Failure {
            rank: self.rank,
            reason: reason.to_owned(),
            from_peer: false,
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
        assert_eq!(
            describe(&header),
            "all_gather of 4096 bf16 (3), sequence number 7"
        );
        assert_eq!(describe(&header[1..]), "a message without a header");
        let long = GroupCall {
            op: "a name of more than sixteen",
            ..call
        };
        assert!(describe(&header_of(0, long)).starts_with("a name of more t of 4096"));
    }
}
