//! Collectives of an [`MpiRank`] with the other processes of its group.
//!
//! In a collective, each rank sends one message to every other rank: a header that describes the call, then its part.
//! Every rank receives all parts and combines them by rank, as the ranks of a local group do, so the bits are the
//! same. For the few kilobytes of a decode step this is also the fastest algorithm: one latency instead of two.

use crate::calls::{CallError, Comm};
use crate::collective::{Arrival, Collective, DATA, HEADER, describe, header_of};
use crate::state::{Failure, MpiRank};
use ferrum_kernels::{GroupCall, GroupTransport};
use ferrum_types::{Error, Result};
use std::time::{Duration, Instant};

/// The name of this transport in error messages.
const NAME: &str = "mpi";

/// How long a rank that waits polls without sleeping. A decode step takes milliseconds.
const SPIN_TIME: Duration = Duration::from_millis(2);

/// Back-off after that: up to each waiting time, the sleep between two polls. Longer sleeps save the cores of an idle
/// server.
const BACKOFF: [(Duration, Duration); 3] = [
    (Duration::from_millis(50), Duration::from_micros(50)),
    (Duration::from_secs(2), Duration::from_micros(300)),
    (Duration::MAX, Duration::from_millis(2)),
];

impl MpiRank {
    /// The error of a collective in a group that has failed.
    fn failure_error(&self, op: &'static str) -> Option<Error> {
        let Failure { rank, reason, .. } = self.failure()?;
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
                let mut mpi = self.mpi();
                match is_done(&mut mpi.comm) {
                    Ok(true) => return Ok(()),
                    Ok(false) => {}
                    Err(error) => {
                        let failure = Failure {
                            rank: self.rank,
                            reason: error.to_string(),
                            from_peer: false,
                        };
                        self.fail(&mut mpi, failure);
                        continue;
                    }
                }
                mpi.exchange_heartbeats(self);
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
        let buffer = own.buffer_mut(HEADER + bytes);
        let buffer = buffer.ok_or_else(|| Error::invalid(NAME, "a part is being sent"))?;
        buffer[..HEADER].copy_from_slice(header);
        self.fail_group_on_error(fill(&mut buffer[HEADER..]))?;
        let mut mpi = self.mpi();
        for rank in self.others() {
            if let Err(error) = mpi.comm.send(own, rank, DATA) {
                let failure = Failure {
                    rank: self.rank,
                    reason: error.to_string(),
                    from_peer: false,
                };
                self.fail(&mut mpi, failure);
            }
        }
        drop(mpi);
        self.failure_error(call.op).map_or(Ok(()), Err)
    }
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
        self.fail(&mut self.mpi(), failure);
    }

    fn failure(&self) -> Option<(usize, String)> {
        let Failure { rank, reason, .. } = self.failure()?;
        Some((rank, reason))
    }
}
