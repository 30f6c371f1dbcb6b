//! Messages of collectives: a header that describes the call, then the sender's part.

use crate::calls::{CallError, Comm, Transfer};
use ferrum_kernels::GroupCall;
use std::ffi::c_int;

/// Tag of messages of collectives.
pub(crate) const DATA: c_int = 1;

/// Bytes of the header before a part: sequence number and call.
pub(crate) const HEADER: usize = 48;

/// The collective in progress.
#[derive(Debug)]
pub(crate) struct Collective {
    /// Its sequence number.
    pub(crate) sequence: u64,
    /// Outgoing messages of even and of odd sequence numbers: one may still be read while the next one is written.
    pub(crate) own: [Transfer; 2],
    /// Messages of the other ranks, by rank.
    pub(crate) parts: Vec<Transfer>,
    pub(crate) arrivals: Vec<Arrival>,
    /// The header of this rank's call. Those of the other ranks have to be equal.
    pub(crate) header: [u8; HEADER],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    Pending,
    Receiving,
    Received,
}

impl Collective {
    pub(crate) fn new(size: usize) -> Self {
        let mut parts = Vec::new();
        parts.resize_with(size, Transfer::default);
        Self {
            sequence: 0,
            own: Default::default(),
            parts,
            arrivals: vec![Arrival::Pending; size],
            header: [0; HEADER],
        }
    }

    /// Receives parts that have arrived; returns whether all are received.
    pub(crate) fn receive(
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
    pub(crate) fn find_mismatch(
        &self,
        others: impl Iterator<Item = usize>,
    ) -> Option<(usize, String)> {
        let mut others = others.map(|rank| (rank, self.parts[rank].bytes()));
        let (rank, bytes) = others.find(|(_, bytes)| bytes.get(..HEADER) != Some(&self.header))?;
        Some((rank, describe(bytes.get(..HEADER).unwrap_or_default())))
    }
}

pub(crate) fn header_of(sequence: u64, call: GroupCall) -> [u8; HEADER] {
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

pub(crate) fn describe(header: &[u8]) -> String {
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
