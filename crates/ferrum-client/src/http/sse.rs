//! Server-sent events, as streams of language models use them: the data of each event.

use crate::{ClientError, Result};

/// Longest event.
const MAX_EVENT: usize = 4 << 20;

/// Takes a stream apart, wherever its pieces end.
#[derive(Debug, Default)]
pub struct Events {
    /// The beginning of a line.
    line: Vec<u8>,
    /// The data of the event so far.
    data: Vec<u8>,
    has_data: bool,
}

impl Events {
    /// Adds a piece of the stream, and gives the data of each event that ends in it.
    ///
    /// # Errors
    /// [`ClientError::Protocol`] for an event that is too long or no UTF-8.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<String>> {
        let mut events = Vec::new();
        for piece in bytes.split_inclusive(|&b| b == b'\n') {
            self.line.extend_from_slice(piece);
            if self.line.len() + self.data.len() > MAX_EVENT {
                return Err(protocol(format!(
                    "an event is longer than {MAX_EVENT} bytes"
                )));
            }
            if piece.ends_with(b"\n") {
                let mut line = std::mem::take(&mut self.line);
                while line.last().is_some_and(|b| b"\r\n".contains(b)) {
                    line.pop();
                }
                events.extend(self.end_line(&line)?);
            }
        }
        Ok(events)
    }

    fn end_line(&mut self, line: &[u8]) -> Result<Option<String>> {
        if let Some(data) = line.strip_prefix(b"data:") {
            if self.has_data {
                self.data.push(b'\n');
            }
            self.has_data = true;
            self.data
                .extend_from_slice(data.strip_prefix(b" ").unwrap_or(data));
        }
        // Comments, names and numbers of events are of no use here.
        if !line.is_empty() || !self.has_data {
            return Ok(None);
        }
        self.has_data = false;
        let data = String::from_utf8(std::mem::take(&mut self.data));
        data.map(Some)
            .map_err(|_| protocol("an event is no UTF-8".into()))
    }
}

fn protocol(reason: String) -> ClientError {
    ClientError::Protocol {
        url: "stream".into(),
        reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STREAM: &str = "data: {\"a\": 1}\n\n: comment\n\ndata:x\r\ndata:  ü\r\n\r\nevent: e\nid: 7\n\ndata\n\ndata: [DONE]\n\n";

    #[test]
    fn events_are_the_same_wherever_the_pieces_end() {
        let expected = ["{\"a\": 1}", "x\n ü", "[DONE]"];
        let bytes = STREAM.as_bytes();
        for cut in 0..=bytes.len() {
            let mut events = Events::default();
            let mut found = events.push(&bytes[..cut]).unwrap();
            found.extend(events.push(&bytes[cut..]).unwrap());
            assert_eq!(found, expected, "cut at {cut}");
        }
    }

    #[test]
    fn events_have_a_limit() {
        let mut events = Events::default();
        let line = vec![b'x'; 1 << 20];
        let error = (0..5).find_map(|_| events.push(&line).err()).unwrap();
        assert!(error.to_string().contains("longer than"), "{error}");
        assert!(Events::default().push(b"data: \xff\n\n").is_err());
    }

    proptest! {
        #[test]
        fn nothing_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Events::default().push(&bytes);
        }
    }
}
